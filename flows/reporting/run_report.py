"""The report on a flow run that is over, read from its ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...sandbox.outcomes.html_table import render_html_table
from ...sandbox.result import MaybeNone, Outcome, Result
from ...tasks.ledger.run_record import Direction
from ..search.plan import parse_objectives
from ..search.study_export import build_study
from .best_trial import BestTrial
from .data_frame import build_data_frame
from .ledger_reader import open_run_ledger
from .pareto_front import ParetoFront
from .text_table import BEST_MARK, PARETO_MARK, align_rows, format_rows

MAX_SHOWN_ROWS = 100  # of a table in a notebook or at a prompt


@dataclass(frozen=True, slots=True)
class RunReport:
    """A flow run's outcomes in order, and the best of them where it had an objective.

    `flow` and `name` are the flow's and the run's. Where it had several objectives, those that no other beats are the
    `pareto_front`; `space` is what was searched. Printed, it is a table of variables and fields.
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

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each execution. Raises ConfigurationError where pandas is not installed."""
        return build_data_frame(self.results)

    @property
    def best_trials(self) -> Sequence[Result]:
        """The best trial, or with several objectives those on the Pareto front."""
        return self.pareto_front or ([] if self.best is None else [self.best])

    @property
    def mark(self) -> str:
        """The note of the best trial in a row of the table, or of those on the front."""
        return PARETO_MARK if self.pareto_front else BEST_MARK

    def study(self, storage: str | None = None, name: str | None = None) -> Any:
        """A sweep's trials as an Optuna study, as `SweepReport.study` has it. Raises ConfigurationError."""
        objectives = parse_objectives(self.objective, self.direction)
        return build_study(self.results, objectives, self.space, storage=storage, name=name)

    def _repr_html_(self) -> str:
        return render_outcomes(self.results, self.best_trials, self.mark)

    def __str__(self) -> str:
        return align_rows(format_rows(self.results, self.best_trials, MAX_SHOWN_ROWS, mark=self.mark))


def load_report(run: str) -> RunReport:
    """The report on a flow run, by its id, its name, or the path or location of its results.

    It is read from the ledger, whether the run is over or not, and no server is asked. Of an execution that was run
    again the outcome that counts is there. Raises ConfigurationError where there is no such run.
    """
    reader = open_run_ledger(str(run))
    record = reader.records[-1]
    spec = record.report_spec
    best, front = BestTrial(spec.objective, spec.direction), ParetoFront(spec.objectives)
    results = list(reader.read_outcomes())
    for outcome in results:
        if isinstance(outcome, Result) and spec.objectives:
            front.consider(outcome)
        elif isinstance(outcome, Result):
            best.consider(outcome)
    several = spec.objectives
    return RunReport(
        record.flow,
        record.name,
        results,
        best.result,
        [item.name for item in several] if several else spec.objective,
        [item.direction for item in several] if several else spec.direction,
        str(reader.ledger.path),
        front.results,
        spec.space,
    )


def load_reference(value: dict[str, Any]) -> Any:
    """The report that a deployment's run has left a reference to as its result; other dicts as they are.

    Prefect calls it, where somebody asks for the result of such a run. Raises ConfigurationError where the ledger
    cannot be read from here.
    """
    return load_report(value["results_path"]) if value.keys() == {"flow_run_id", "results_path"} else value


def render_outcomes(outcomes: Sequence[Outcome], best: Sequence[Result] = (), mark: str = BEST_MARK) -> str:
    """The first of the outcomes and the `best` as an HTML table, and how many more there are."""
    header, *rows = format_rows(outcomes, best, MAX_SHOWN_ROWS, mark=mark)
    rest = len(outcomes) - MAX_SHOWN_ROWS
    return render_html_table(header, rows) + (f"<p>{rest:,} more are in the report.</p>" if rest > 0 else "")
