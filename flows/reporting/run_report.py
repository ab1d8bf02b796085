"""The report on a flow run that is over, read from its ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...sandbox.outcomes.html_table import render_html_table
from ...sandbox.result import MaybeNone, Outcome, Result
from ...tasks.ledger.run_record import Direction
from .best_trial import BestTrial
from .data_frame import build_data_frame
from .ledger_reader import open_run_ledger
from .text_table import align_rows, format_rows

MAX_SHOWN_ROWS = 100  # of a table in a notebook or at a prompt


@dataclass(frozen=True, slots=True)
class RunReport:
    """A flow run's outcomes in order, and the best of them where it had an objective.

    `flow` and `name` are the flow's and the run's. Printed, it is a table of variables and fields.
    """

    flow: str
    name: str
    results: Sequence[Outcome]
    best: Result | MaybeNone
    objective: str | None
    direction: Direction
    results_path: str

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each execution. Raises ConfigurationError where pandas is not installed."""
        return build_data_frame(self.results)

    def _repr_html_(self) -> str:
        return render_outcomes(self.results, self.best)

    def __str__(self) -> str:
        return align_rows(format_rows(self.results, self.best, MAX_SHOWN_ROWS))


def load_report(run: str) -> RunReport:
    """The report on a flow run, by its id, its name, or the path or location of its results.

    It is read from the ledger, whether the run is over or not, and no server is asked. Of an execution that was run
    again the outcome that counts is there. Raises ConfigurationError where there is no such run.
    """
    reader = open_run_ledger(str(run))
    record = reader.records[-1]
    best = BestTrial(record.objective, record.direction)
    results = list(reader.read_outcomes())
    for outcome in results:
        if isinstance(outcome, Result):
            best.consider(outcome)
    return RunReport(
        record.flow, record.name, results, best.result, record.objective, record.direction, str(reader.ledger.path)
    )


def render_outcomes(outcomes: Sequence[Outcome], best: Result | None = None) -> str:
    """The first of the outcomes as an HTML table, and how many more there are."""
    header, *rows = format_rows(outcomes, best, MAX_SHOWN_ROWS)
    rest = len(outcomes) - MAX_SHOWN_ROWS
    return render_html_table(header, rows) + (f"<p>{rest:,} more are in the report.</p>" if rest > 0 else "")
