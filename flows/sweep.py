"""The sweep flow: one piece of code over the points of a search space, and the best trial by an objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..sandbox.result import MaybeNone, Outcome, Result
from ..tasks.ledger.run_record import Direction, ReportSpec
from .decorator import batch_flow
from .engine.execution_labels import trial_label
from .engine.failures import raise_failures
from .engine.job import execute_items
from .inputs.conversion import GridValues, Items, PathText, Variables
from .inputs.readers import Grid, Inputs, read_points
from .inputs.spilling import read_text_reference
from .parameters import Options, SharedParameters
from .reporting.best_trial import BestTrial
from .reporting.data_frame import build_data_frame
from .reporting.run_report import render_outcomes
from .reporting.text_table import align_rows, format_rows


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A sweep's trials in the order of the space, and the best of them.

    `best` is the result with the least (or greatest) objective, the first of equals; None where no objective was
    asked for or no trial succeeded. Printed, it is a table of variables and fields.
    """

    trials: Sequence[Outcome]
    best: Result | MaybeNone
    objective: str | None
    direction: Direction
    results_path: str

    def rows(self, limit: int | None = None, *, shows_output: bool = False) -> list[list[str]]:
        """The table's rows of text, the header first: number, variables, fields, and what became of the trial.

        With a `limit` they are so many of the first, and the best where that is not among them. With `shows_output`
        they have the last line that the code printed, where any did.
        """
        return format_rows(self.trials, self.best, limit, shows_output=shows_output)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each trial. Raises ConfigurationError where pandas is not installed."""
        return build_data_frame(self.trials)

    def _repr_html_(self) -> str:
        return render_outcomes(self.trials, self.best)

    def __str__(self) -> str:
        return align_rows(self.rows())


@batch_flow("sweep")
async def sweep(
    code: Annotated[str, Field(description="Python code that reads the trial's variables and submits the objective")],
    grid: Annotated[
        GridValues | None, Field(description="Values of each variable; every combination is a trial")
    ] = None,
    points: Annotated[
        Items[Variables] | PathText | None, Field(description="The trials' variables, or a path to JSON lines or CSV")
    ] = None,
    objective: Annotated[
        str | None, Field(description="The submitted field that decides which trial is the best")
    ] = None,
    direction: Annotated[Direction, Field(description="Whether the best has the least or the greatest")] = "minimize",
    **parameters: Unpack[SharedParameters],
) -> SweepReport:
    """Runs the code once for each point of the space, with the point's variables, and reports the best trial.

    The space is a `grid` (every combination) or a list of `points`. What the other parameters mean is in
    docs/reference.md.

    Raises ExecutionsFailed when all are done and some trials failed (with `on_failure="return"` a `Failure` stands in
    their place), and ConfigurationError before anything runs, or at the end if no trial submitted the objective.
    """
    code = read_text_reference(code)
    points_of_space = space(grid, points)  # type: ignore[arg-type]  # lists and text by now
    options = Options.from_parameters(parameters)
    items = ((code, point) for point in points_of_space)
    outcomes = await execute_items(
        items,
        total=len(points_of_space),
        options=options,
        label=trial_label,
        report_spec=ReportSpec("trial", objective, direction),
    )
    if options.on_failure == "raise":
        raise_failures(outcomes, "trials")
    return report(outcomes.results, objective, direction, outcomes.results_path)


def report(trials: Sequence[Outcome], objective: str | None, direction: Direction, results_path: str) -> SweepReport:
    """The report on these trials. Raises ConfigurationError if none of those that succeeded submitted the objective."""
    best = BestTrial(objective, direction)
    succeeded, fields = 0, dict[str, None]()
    for trial in trials if objective is not None else ():  # one at a time: there may be more than fit in memory
        if isinstance(trial, Result):
            succeeded += 1
            fields.update(dict.fromkeys(trial.outputs))
            best.consider(trial)
    if best.result is None and succeeded:
        said = f"they submitted {', '.join(fields)}" if fields else "none of them called SUBMIT with any field"
        what = "submitted it as a number" if objective in fields else "submitted it"
        raise ConfigurationError(
            f"the objective is {objective!r}, and of {succeeded} trials none {what}: {said}. Name another "
            f"objective; the results are in {results_path}"
        )
    return SweepReport(trials, best.result, objective, direction, results_path)


def space(grid: dict[str, list[Any]] | None, points: list[dict[str, Any]] | str | None) -> Inputs:
    """The search space that these parameters stand for. Raises ConfigurationError."""
    if grid is not None and points is not None:
        raise ConfigurationError("the space was given twice: pass a grid or points, not both")
    if points is not None:
        return read_points(points)
    if grid is None:
        raise ConfigurationError("the space is missing: pass a grid (values of each variable) or a list of points")
    return Grid(grid)
