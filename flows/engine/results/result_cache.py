"""Results that need not be computed again: of earlier runs on this ledger, and with `cache_results` of every ledger."""

from collections.abc import Callable
from dataclasses import dataclass

from ....sandbox.result import Result
from ....tasks.execution import Execution, with_index
from ....tasks.ledger.ledger import Ledger, LedgerLine
from ....tasks.ledger.result_index import ResultIndex

ShouldTake = Callable[[Result], bool]


@dataclass(frozen=True, slots=True)
class ResultCache:
    """Looks up executions by their keys: first in the ledger's previous lines, then in the index of all ledgers.

    `find_previous_line` returns the line of a key that the ledger had when the run was opened, None where there was
    none. It is asked once for each execution.
    """

    ledger: Ledger
    find_previous_line: Callable[[str], LedgerLine | None]
    index: ResultIndex | None = None

    def find_result(self, execution: Execution, should_take: ShouldTake = lambda _result: True) -> Result | None:
        """The result that this execution has from before, if there is one that counts, which `should_take` decides."""
        line = self.find_previous_line(execution.key)
        outcome = line.to_outcome() if line is not None and line.is_success else None
        if isinstance(outcome, Result) and should_take(outcome):
            return outcome
        line = None if self.index is None else self.index.find_result(execution.key)
        outcome = None if line is None else line.to_outcome()
        if isinstance(outcome, Result) and should_take(outcome):
            self.adopt_result(execution, outcome)
            return outcome
        return None

    def adopt_result(self, execution: Execution, result: Result) -> None:
        """Writes a result from elsewhere to this run's own ledger."""
        self.ledger.write_outcome(execution.key, with_index(result, execution.index))
