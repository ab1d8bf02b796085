"""The outcomes that a flow run has so far: all of them in memory, or counted where another run has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...sandbox.errors import DeadlineExceeded
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution


class Kept(Protocol):
    """Outcomes by the numbers of their executions."""

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """The execution has this outcome."""

    def __contains__(self, index: int) -> bool: ...

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes so far, in order."""
        ...

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        ...


class InMemory:
    """Of so many executions, numbered from 0."""

    def __init__(self, total: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * total

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        self._outcomes[execution.index] = outcome

    def __contains__(self, index: int) -> bool:
        return self._outcomes[index] is not None

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for outcome in self._outcomes if outcome is not None]

    @property
    def failures(self) -> list[Failure]:
        return [outcome for outcome in self._outcomes if isinstance(outcome, Failure)]


class Counted:
    """Of a run that only writes them to the ledger, from where another reads them."""

    def __init__(self) -> None:
        self.outcome_count = self.failure_count = 0
        self.late_count = 0  # that the deadline left undone: no ledger has these

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        if isinstance(outcome, Failure) and isinstance(outcome.error, DeadlineExceeded):
            self.late_count += 1
            return
        self.outcome_count += 1
        self.failure_count += isinstance(outcome, Failure)

    def __contains__(self, index: int) -> bool:
        return False

    @property
    def outcomes(self) -> list[Outcome]:
        return []

    @property
    def failures(self) -> list[Failure]:
        return []
