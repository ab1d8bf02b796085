"""The outcomes that a flow run has so far: all of them in memory, or only counted where another run reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...sandbox.errors import DeadlineExceeded, RlmBatchError
from ...sandbox.meta import Meta
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution
from .events import EventPublisher


class OutcomeStore(Protocol):
    """Outcomes by the numbers of their executions."""

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Stores the outcome of an execution."""
        ...

    def __contains__(self, index: int) -> bool: ...

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes so far, in order."""
        ...

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        ...


class MemoryStore:
    """The outcomes of so many executions, numbered from 0."""

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


class CountingStore:
    """The number of outcomes of a run that only writes them to the ledger, from where another reads them."""

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


class OutcomeRecorder:
    """Stores each outcome of a run, and publishes it."""

    def __init__(self, store: OutcomeStore, events: EventPublisher, *, provider_name: str) -> None:
        self.store = store
        self.events = events
        self._provider_name = provider_name

    def record(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """Stores and publishes the outcome of an execution."""
        self.store.add_outcome(execution, outcome)
        self.events.publish_outcome(execution, outcome, cached=cached)

    def record_failure(self, execution: Execution, error: RlmBatchError) -> None:
        """Stores and publishes the failure of an execution that has no outcome of its own. No ledger has it."""
        meta = Meta(
            index=execution.index,
            variables=execution.variables,
            provider=self._provider_name,
            attempt=execution.attempt,
            earlier_errors=execution.earlier_errors,
        )
        self.record(execution, Failure(error, meta))

    def record_failure_before_start(self, execution: Execution, error: RlmBatchError) -> None:
        """The same for an execution that was never started here, which whoever watches counts as started first."""
        self.events.publish_execution_start(execution.index)
        self.record_failure(execution, error)
