"""The sweep flow: one piece of code over the points of a search space, and the best trial by an objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from prefect import get_run_logger
from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..sandbox.result import MaybeNone, Outcome, Result
from ..tasks.ledger.run_record import Direction, Objective, ReportSpec
from .decorator import batch_flow
from .engine.execution_labels import trial_label
from .engine.failures import raise_failures
from .engine.job import execute_items, locate_run_ledger
from .inputs.conversion import Code, GridValues, Items, PathText, SpaceValues, Variables
from .inputs.readers import (
    Grid,
    Inputs,
    TypesOfColumns,
    check_variables,
    get_column_types,
    read_points,
    resolve_types_of,
)
from .inputs.spilling import read_text_reference
from .inputs.tables import Report
from .parameters import Options, SharedParameters, Types
from .reporting.export import build_data_frame
from .reporting.summary import BestTrial, ParetoFront, is_nonfinite, is_score
from .reporting.table import BEST_MARK, PARETO_MARK, align_rows, format_rows, render_outcomes
from .search.plan import SearchPlan, parse_objectives, plan_search
from .search.search import draw_points, execute_search
from .search.study import build_study, check_sampler

DEFAULT_SAMPLER, DEFAULT_SEED = "tpe", 0
# Of values that are no scores.
KINDS = {str: "text", bool: "a bool", list: "a list", dict: "a dict", int: "an integer that no float holds"}


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A sweep's trials in the order of the space, and the best of them.

    `best` is the result with the least (or greatest) objective, the first of equals; None where no objective was
    asked for, where there are several, or where no trial succeeded. With several objectives `pareto_front` has the
    results that no other beats in all of them. Printed, it is a table of variables and fields.
    """

    trials: Sequence[Outcome]
    best: Result | MaybeNone
    objective: str | list[str] | None
    direction: Direction | list[Direction]
    results_path: str
    pareto_front: Sequence[Result] = ()
    space: Any = None

    def rows(self, limit: int | None = None, *, shows_output: bool = False) -> list[list[str]]:
        """The table's rows of text, the header first: number, variables, fields, and what became of the trial.

        With a `limit` they are so many of the first, and the best where that is not among them. With `shows_output`
        they have the last line that the code printed, where any did.
        """
        return format_rows(self.trials, self.best_trials, limit, mark=self.mark, shows_output=shows_output)

    @property
    def best_trials(self) -> Sequence[Result]:
        """The best trial, or with several objectives those on the Pareto front."""
        return self.pareto_front if self.best is None else [self.best]

    @property
    def mark(self) -> str:
        """The note of the best trial in a row of the table, or of those on the front."""
        return PARETO_MARK if self.pareto_front else BEST_MARK

    def study(self, storage: str | None = None, name: str | None = None) -> Any:
        """The trials as an Optuna study, in memory or in the storage with that URL, for Optuna's own tools.

        A storage such as `sqlite:///study.db` gets a new study of that `name`. Of a sweep without a space the
        distributions are made of the values that there are. Raises ConfigurationError where Optuna is not installed.
        """
        objectives = parse_objectives(self.objective, self.direction)
        return build_study(self.trials, objectives, self.space, storage=storage, name=name)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each trial. Raises ConfigurationError where pandas is not installed."""
        return build_data_frame(self.trials)

    def _repr_html_(self) -> str:
        return render_outcomes(self.trials, self.best_trials, self.mark)

    def __str__(self) -> str:
        return align_rows(self.rows())


@batch_flow("sweep")
async def sweep(
    code: Annotated[Code, Field(description="Python code that reads the trial's variables and submits the objective")],
    grid: Annotated[
        GridValues | None, Field(description="Values of each variable; every combination is a trial")
    ] = None,
    points: Annotated[
        Items[Variables] | PathText | None,
        Field(description="The trials' variables, or a path to JSON lines, CSV or Parquet"),
    ] = None,
    objective: Annotated[
        str | list[str] | None,
        Field(description="The submitted field that decides which trial is the best, or several"),
    ] = None,
    direction: Annotated[
        Direction | list[Direction],
        Field(description="Whether the best has the least or the greatest, of each objective"),
    ] = "minimize",
    space: Annotated[
        SpaceValues | None,
        Field(description="Choices or bounds of each variable, from which a sampler draws; or a list of alternatives"),
    ] = None,
    trials: Annotated[
        int | None, Field(ge=1, description="How many points of the space are tried, 100,000 at most")
    ] = None,
    sampler: Annotated[
        str,
        Field(min_length=1, description="random, tpe, or the import path of another, as optuna.samplers:NSGAIISampler"),
    ] = DEFAULT_SAMPLER,
    seed: Annotated[
        int, Field(description="What the sampler draws from, with the number of each trial")
    ] = DEFAULT_SEED,
    pruner: Annotated[
        str | None, Field(description="median or asha: ends trials by what they report; by default none")
    ] = None,
    types: Types = None,
    **parameters: Unpack[SharedParameters],
) -> SweepReport:
    """Runs the code once for each point of the space, with the point's variables, and reports the best trial.

    The points are a `grid` (every combination), a list of `points`, or drawn from a `space` by a sampler that goes by
    what the trials before have come to. What the other parameters mean is in docs/reference.md.

    Raises ExecutionsFailed when all are done and some trials failed (with `on_failure="return"` a `Failure` stands in
    their place), and ConfigurationError before anything runs, or at the end if no trial submitted the objective.
    """
    code = read_text_reference(code)  # type: ignore[arg-type]  # a text by now
    objectives = parse_objectives(objective, direction)
    options = Options.from_parameters(parameters)
    prepare = None if options.prepare is None else read_text_reference(options.prepare)
    how = resolve_types_of(points, types, locate_run_ledger(options))  # type: ignore[arg-type]  # lists and text by now
    tried = choose_points(
        grid, points, space,
        trials=trials, sampler=sampler, seed=seed, pruner=pruner, objectives=objectives, code=code,
        prepare=prepare, is_sharded=options.shards is not None, types=how, report=get_run_logger().info,
    )  # fmt: skip
    named = tried.space.alternatives if isinstance(tried, SearchPlan) else tried
    check_variables(code, named, needs_all=options.prepare is None)
    spec = ReportSpec.for_trials(objectives, space)
    if isinstance(tried, SearchPlan) and options.shards is None:
        outcomes = await execute_search(tried, code, options, trial_label, spec)
    else:
        listed = draw_points(tried) if isinstance(tried, SearchPlan) else tried
        items = ((code, point) for point in listed)
        outcomes = await execute_items(
            items,
            total=len(listed),
            options=options,
            label=trial_label,
            report_spec=spec,
            column_types=get_column_types(listed),
        )
    if options.on_failure == "raise":
        raise_failures(outcomes, "trials")
    return report(outcomes.results, objective, direction, outcomes.results_path, space)


def report(
    trials: Sequence[Outcome],
    objective: str | list[str] | None,
    direction: Direction | list[Direction],
    results_path: str,
    space: Any = None,
) -> SweepReport:
    """The report on these trials. Raises ConfigurationError if none of those that succeeded submitted the objective."""
    objectives = parse_objectives(objective, direction)
    first = objectives[0] if objectives else Objective("")
    best = BestTrial(first.name, first.direction) if len(objectives) == 1 else None
    front = ParetoFront(objectives) if len(objectives) > 1 else None
    succeeded, fields, wrong = 0, dict[str, None](), dict[str, Any]()
    for trial in trials if objectives else ():  # one at a time: there may be more than fit in memory
        if isinstance(trial, Result) and not trial.meta.pruned:
            succeeded += 1
            fields.update(dict.fromkeys(trial.outputs))
            for name in {item.name for item in objectives} & trial.outputs.keys():
                if not is_score(trial.outputs[name]) and not is_nonfinite(trial.outputs[name]):
                    wrong[name] = trial.outputs[name]
            if best is not None:
                best.consider(trial)
            if front is not None:
                front.consider(trial)
    found = [] if best is None or best.result is None else [best.result]
    pareto_front = [] if front is None else front.results
    if not found and not pareto_front and succeeded:
        _refuse_objective(objectives, fields, wrong, succeeded, results_path)
    return SweepReport(
        trials, found[0] if found else None, objective, direction, results_path, tuple(pareto_front), space
    )


def _refuse_objective(
    objectives: Sequence[Objective],
    fields: dict[str, None],
    wrong: dict[str, Any],
    succeeded: int,
    results_path: str,
) -> None:
    """Raise ConfigurationError that names the missing objective, or one of the `wrong` values, which are no numbers."""
    submitted = f"they submitted {', '.join(fields)}" if fields else "none of them called SUBMIT with any field"
    missing = next((item.name for item in objectives if item.name not in fields), None)
    name = missing or ", ".join(item.name for item in objectives)
    what = "submitted it as a number" if missing is None else "submitted it"
    remedy = "Name"
    if missing is None and wrong:
        field, value = next(iter(wrong.items()))
        submitted = f"{field} is {KINDS.get(type(value), 'None')}"
        remedy = f"Submit {_find_number(field, value)}, or name"
    raise ConfigurationError(
        f"the objective is {name!r}, and of {succeeded} trials none {what}: {submitted}. {remedy} another "
        f"objective; the results are in {results_path}"
    )


def _find_number(field: str, value: Any) -> str:
    """Return the expression that makes a number of a field's value, where there is one."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return "a number"
    return f"float({field})"


def choose_points(
    grid: Any,
    points: Any,
    space: Any,
    *,
    trials: int | None,
    sampler: str,
    seed: int,
    pruner: str | None,
    objectives: tuple[Objective, ...],
    code: str,
    prepare: str | None = None,
    is_sharded: bool = False,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> Inputs | SearchPlan:
    """The points that these parameters stand for, or the search for them. Raises ConfigurationError."""
    given = [name for name, value in (("grid", grid), ("points", points), ("space", space)) if value is not None]
    if len(given) > 1:
        raise ConfigurationError(f"the space was given twice: pass {' or '.join(given)}, not both")
    if points is None and types is not None:
        raise ConfigurationError("types are those of a CSV file of points, and there is none: leave them out")
    if space is not None:
        plan = plan_search(
            space, trials=trials, objectives=objectives, sampler=sampler, seed=seed, pruner=pruner, code=code,
            prepare=prepare, is_sharded=is_sharded,
        )  # fmt: skip
        check_sampler(plan)
        return plan
    settings = (("trials", trials, None), ("sampler", sampler, DEFAULT_SAMPLER), ("seed", seed, DEFAULT_SEED))
    for name, value, default in (*settings, ("pruner", pruner, None)):
        if value != default:
            raise ConfigurationError(
                f"{name} goes with a space to draw from, and there is none: pass it, or leave {name} out"
            )
    return list_points(grid, points, types, report)


def list_points(
    grid: dict[str, list[Any]] | None,
    points: list[dict[str, Any]] | str | None,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> Inputs:
    """The points that a sweep was given. Raises ConfigurationError."""
    if points is not None:
        return read_points(points, types, report)
    if grid is None:
        raise ConfigurationError(
            "the space is missing: pass a grid (values of each variable), a list of points, or a space to draw from"
        )
    return Grid(grid)
