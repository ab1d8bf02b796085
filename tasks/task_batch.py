"""The executions of one task run, and what is done with their outcomes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ..sandbox.errors import RlmBatchError
from ..sandbox.result import Outcome
from .execution import Execution
from .ledger.ledger import Ledger
from .retry import RetryPolicy
from .task_log import LineBudget, OutputLog


class TaskBatch:
    """Executions that one task run runs, one after the other; printed, it is the task run's name.

    `on_start` is called once, when the task run begins; `on_output` with the number of an execution, a stream and the
    text that the code writes there; `on_outcome` with each outcome that is in the ledger. Once `should_end` says so, no
    other of them is begun.
    """

    def __init__(
        self,
        label: str,
        executions: list[Execution],
        policy: RetryPolicy,
        *,
        ledger: Ledger,
        on_start: Callable[[], None],
        on_output: Callable[[int, str, str], None],
        on_outcome: Callable[[Execution, Outcome], None],
        should_end: Callable[[], bool],
        line_budget: LineBudget | None,
    ) -> None:
        self._label = label
        self._executions = executions
        self.policy = policy
        self.ledger = ledger
        self._on_start = on_start
        self._on_output = on_output
        self._on_outcome = on_outcome
        self.should_end = should_end
        self._line_budget = line_budget
        self.try_count = 0
        self.last_error: RlmBatchError | None = None  # of the last execution that failed for good

    def __str__(self) -> str:
        return self._label

    @property
    def remaining_executions(self) -> Iterable[Execution]:
        """The executions that have no outcome yet."""
        return [execution for execution in self._executions if not execution.is_done]

    def start_try(self) -> None:
        """Counts a try of the task run, and calls `on_start` in the first."""
        self.try_count += 1
        if self.try_count == 1:
            self._on_start()

    @contextmanager
    def open_output_log(self, execution: Execution) -> Iterator[Callable[[str, str], None]]:
        """A function that takes what the code of an attempt writes, for the task run's log where that has it."""
        log = None if self._line_budget is None else OutputLog(self._line_budget, f"{execution.index}: ")

        def write(stream: str, text: str) -> None:
            self._on_output(execution.index, stream, text)
            if log is not None:
                log.write(stream, text)

        try:
            yield write
        finally:
            if log is not None:
                log.close()

    def record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Writes an outcome to the ledger, and then calls `on_outcome`."""
        self.ledger.write_outcome(execution.key, outcome)
        execution.is_done = True
        self._on_outcome(execution, outcome)
