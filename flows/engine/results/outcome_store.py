"""The outcomes that a flow run has so far, in memory; those of a job in shards are in `tasks/ledger/shard_store.py`."""

from ....sandbox.result import Failure, Outcome
from ....tasks.execution import Execution


class MemoryStore:
    """The outcomes of so many executions, numbered from 0."""

    def __init__(self, total: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * total

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Stores the outcome of an execution."""
        self._outcomes[execution.index] = outcome

    def __contains__(self, index: int) -> bool:
        return self._outcomes[index] is not None

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes so far, in order."""
        return [outcome for outcome in self._outcomes if outcome is not None]

    @property
    def failures(self) -> list[Failure]:
        """The failures so far, in order."""
        return [outcome for outcome in self._outcomes if isinstance(outcome, Failure)]
