"""The report on a flow run of any kind, read from its ledger."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..sandbox.result import MaybeNone, Outcome, Result
from ..tasks.ledger.run_record import Direction, ReportSpec
from .reporting.groups import group_outcomes
from .reporting.ledger_reader import open_run_ledger
from .reporting.summary import BestTrials
from .reporting.table import MAX_SHOWN_ROWS, align_rows
from .reports import TrialsReport


@dataclass(frozen=True, slots=True)
class RunReport(TrialsReport):
    """A flow run's outcomes in order, and the best of them if it had an objective.

    The report is a sequence of the outcomes, and prints as a table of variables and fields.

    Attributes:
        flow: The flow's name.
        name: The flow run's name.
        results: A `Result` or `Failure` for each execution, in order.
        best: The first result with the best objective. None without an objective or with several.
        objective: The field that decides, or several; None without an objective.
        direction: "minimize" or "maximize", or one for each objective.
        results_path: The ledger's directory or location.
        pareto_front: With several objectives, the results that no other beats in all of them.
        space: The space that was searched, as JSON; None without one.
        groups: With `repeats`, a result for each input, point or chunk, with the statistics of its fields; otherwise
            empty.
        spec: The objectives and the number of repeats.
    """

    flow: str
    name: str
    results: Sequence[Outcome]
    best: Result | MaybeNone
    objective: str | list[str] | None
    direction: Direction | list[Direction]
    results_path: str
    pareto_front: Sequence[Result] = ()
    space: Any = None
    groups: Sequence[Outcome] = ()
    spec: ReportSpec = field(default_factory=ReportSpec)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes, in order."""
        return self.results

    def __str__(self) -> str:
        return align_rows(self.rows(MAX_SHOWN_ROWS))


def load_report(run: str) -> RunReport:
    """Return the report on a flow run, which may still be running. This needs no server.

    Args:
        run: The run's id, its name, or the path or location of its results.

    Returns:
        The report. If an execution ran several times, the report has the outcome that counts.

    Raises:
        ConfigurationError: There is no such run.
    """
    reader = open_run_ledger(str(run))
    record = reader.records[-1]
    spec = record.report_spec
    best = BestTrials(spec)
    results = list(reader.read_outcomes())
    rows = list(group_outcomes(results, spec))
    for outcome in rows:
        if isinstance(outcome, Result):
            best.consider(outcome)
    return RunReport(
        flow=record.flow,
        name=record.name,
        results=results,
        best=best.result,
        objective=[item.name for item in spec.objectives] or spec.objective,
        direction=[item.direction for item in spec.objectives] or spec.direction,
        results_path=str(reader.ledger.path),
        pareto_front=best.results if spec.objectives else (),
        space=spec.space,
        groups=rows if spec.repeats is not None else (),
        spec=spec,
    )


def load_reference(value: dict[str, Any]) -> Any:
    """Return the report for a reference, which is the result of a deployment's run. Return other dicts unchanged.

    Prefect calls this function when a program reads the run's result. Raises ConfigurationError if this process cannot
    read the ledger.
    """
    return load_report(value["results_path"]) if value.keys() == {"flow_run_id", "results_path"} else value
