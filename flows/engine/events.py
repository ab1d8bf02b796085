"""What becomes of an outcome as it comes: it is stored, and the log, the artifacts and a listener are told."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...sandbox.errors import NotRun, RlmBatchError
from ...sandbox.meta import Meta
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution
from ..listener import FlowListener
from .artifacts import ArtifactPublisher
from .context import RunContext
from .failures import describe_kind

MAX_LOGGED_FAILURES = 20  # of a kind, each with a line of its own
NOT_COLLECTED = "files that were not collected"  # a kind that fails nothing


@dataclass(frozen=True, slots=True)
class OutcomeRecorder:
    """Stores each outcome of a run, and tells its log, its artifacts and its listener of it, where there are any.

    `observers` are called with each that is stored here.
    """

    context: RunContext
    store_outcome: Callable[[Execution, Outcome], None]
    listener: FlowListener = field(default_factory=FlowListener)
    artifacts: ArtifactPublisher | None = None
    observers: list[Callable[[Execution, Outcome], None]] = field(
        default_factory=list[Callable[[Execution, Outcome], None]]
    )
    _failures: Counter[str] = field(default_factory=Counter[str])

    def warn(self, text: str) -> None:
        """Tells the log and the listener what a person should know."""
        self.context.log.warning("%s", text)
        self.listener.on_warning(text)

    def record(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """Stores and publishes the outcome of an execution."""
        self.store_outcome(execution, outcome)
        for observe in self.observers:
            observe(execution, outcome)
        self.publish(execution, outcome, cached=cached)

    def publish(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """Tells of an outcome that is stored already."""
        if isinstance(outcome, Failure):
            error, label = outcome.error, self.context.label(execution)
            kind = describe_kind(error)
            self._failures[kind] += 1
            count, limit = self._failures[kind], _get_log_limit(kind)
            if count <= limit:
                self.context.log.warning("%s failed: %s: %s", label, type(error).__name__, error.summary)
            if count == limit and limit > 1:
                self.context.log.warning("Further failures with %s are counted, and told at the end", kind)
        if outcome.meta.not_collected and not cached:
            self._log_not_collected(execution, outcome.meta.not_collected)
        if self.artifacts is not None:
            self.artifacts.add_outcome(outcome)
        self.listener.on_outcome(outcome, cached=cached)

    def _log_not_collected(self, execution: Execution, problems: Sequence[str]) -> None:
        self._failures[NOT_COLLECTED] += 1
        if self._failures[NOT_COLLECTED] <= MAX_LOGGED_FAILURES:
            more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
            self.warn(f"{self.context.label(execution)}: not collected: {problems[0]}{more}")

    def log_unlogged_failures(self) -> None:
        """Tells the log how many failures of a kind there were, where not each has had a line."""
        for kind, count in self._failures.items():
            if kind != NOT_COLLECTED and count > _get_log_limit(kind):
                self.context.log.warning("%d executions failed with %s", count, kind)

    def build_failure(self, execution: Execution, error: RlmBatchError) -> Failure:
        """The failure of an execution that has no outcome of its own."""
        meta = Meta(
            index=execution.index,
            variables=execution.variables,
            provider=self.context.provider.provider_name,
            attempt=execution.attempt,
            earlier_errors=execution.earlier_errors,
        )
        return Failure(error, meta)

    def record_failure(self, execution: Execution, error: RlmBatchError) -> None:
        """Stores and publishes the failure of an execution that has no outcome of its own. No ledger has it."""
        self.record(execution, self.build_failure(execution, error))

    def record_failure_before_start(self, execution: Execution, error: RlmBatchError) -> None:
        """The same for an execution that was never started here, which whoever watches counts as started first."""
        self.listener.on_execution_start(execution.index)
        self.record_failure(execution, error)


def _get_log_limit(kind: str) -> int:
    """How many failures of a kind have a line each in the log: of executions that were not run one, for all say why."""
    return 1 if kind == NotRun.__name__ else MAX_LOGGED_FAILURES
