"""The outcome sink of a flow run, which records every outcome."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from ...sandbox.errors import CodeError, ConfigurationError, NotRun, RlmBatchError
from ...sandbox.meta import Meta
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.execution import Execution
from .run import Run

MAX_TYPE_CHARS = 100  # characters of the name of an exception's type, which code chooses
MAX_LOGGED_FAILURES = 20  # failures of each kind that get a line each in the log
LOG_INTERVAL_SECONDS = 10.0  # seconds between two lines of progress in the log

Observer = Callable[[Execution, Outcome], None]


class MemoryStore:
    """The outcomes of a flow run, in memory. Jobs in shards use the store in `tasks/ledger/shards.py`."""

    def __init__(self, size: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * size

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Store the outcome of an execution."""
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


@dataclass(slots=True)
class OutcomeSink:
    """A sink that passes every outcome of a flow run to the ledger, to the observers, the log, artifacts and listener.

    The first observer is the run's store. The plan's `check_first` gets the first result with fields.
    """

    run: Run
    observers: list[Observer]
    failure_counts: Counter[str] = field(default_factory=Counter[str])  # the number of failures of each kind
    _has_checked_first: bool = False
    _not_collected_count: int = 0  # executions of which files were not collected
    _error: ConfigurationError | None = None  # the error of `check_first`
    _logged_at: float = field(default_factory=time.monotonic)  # when the log got its last line of progress

    def record(self, execution: Execution, outcome: Outcome) -> None:
        """Record the outcome of an execution that ran here. Raises OSError if the ledger cannot be written."""
        self.run.ledger.write_outcome(execution.key, outcome, execution.unchecked_key)
        execution.ended, execution.archive = None, b""  # Free their memory.
        self._store(execution, outcome)
        self._publish(execution, outcome)
        self.run.stop.failed_count += isinstance(outcome, Failure)

    def record_unrun(self, execution: Execution, error: RlmBatchError, *, is_written: bool = False) -> None:
        """Record the failure of an execution that did not finish. It does not count towards `max_failures`.

        The ledger gets the failure if `is_written`, and always if the execution asked a model.
        """
        failure = self._build_unrun_failure(execution, error)
        if is_written or failure.meta.queries.asked:
            self.run.ledger.write_outcome(execution.key, failure)
        self._store(execution, failure)
        self._publish(execution, failure)

    def save_queries(self, execution: Execution) -> None:
        """Write the queries of a cancelled execution to the ledger, because they were paid for."""
        failure = self._build_unrun_failure(execution, NotRun("the run was cancelled before this execution had ended"))
        if failure.meta.queries.asked:
            self.run.ledger.write_outcome(execution.key, failure)

    def _build_unrun_failure(self, execution: Execution, error: RlmBatchError) -> Failure:
        meta = Meta(
            variables=execution.variables,
            provider=self.run.provider.provider_name,
            queries=execution.summarize_queries(),
        )
        return Failure(error, execution.complete_meta(meta))

    def record_cached(self, execution: Execution, outcome: Outcome, *, is_stored: bool = False) -> None:
        """Record an execution's outcome from an earlier run. With `is_stored`, the store already has it."""
        if not is_stored:
            self._store(execution, outcome)
        self._publish(execution, outcome, cached=True)

    def record_gathered(self, execution: Execution, outcome: Outcome) -> None:
        """Record the outcome of an execution in another process. The ledger and the store already have it."""
        self._publish(execution, outcome)
        self.run.stop.failed_count += isinstance(outcome, Failure)

    def raise_error(self) -> None:
        """Raise the ConfigurationError of the plan's `check_first`, if there was one. It ends the run."""
        if self._error is not None:
            raise self._error

    def warn(self, text: str) -> None:
        """Send a warning to the log and to the listener."""
        self.run.log.warning("%s", text)
        self.run.listener.on_warning(text)

    def _store(self, execution: Execution, outcome: Outcome) -> None:
        execution.is_done = True
        for observe in self.observers:
            observe(execution, outcome)

    def _publish(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """Pass an outcome to the log, the summary, the listener and `check_first`."""
        if isinstance(outcome, Failure):
            self._log_failure(execution, outcome.error)
            if outcome.meta.kept_until is not None and not cached:
                self._warn_of_kept_sandbox(execution, outcome.meta.kept_until)
        if outcome.meta.not_collected and not cached:
            self._warn_of_missing_files(execution, outcome.meta.not_collected)
        if self.run.summary is not None:
            self.run.summary.add(outcome)
            if time.monotonic() >= self._logged_at + LOG_INTERVAL_SECONDS:
                self._logged_at = time.monotonic()
                self.run.log.info("%s so far", self.run.summary.count_outcomes(self.run.plan.total))
        self.run.listener.on_outcome(outcome, cached=cached)
        check = self.run.plan.check_first
        if outcome.meta.is_reduction or check is None or self._has_checked_first or not isinstance(outcome, Result):
            return
        if outcome.outputs and not outcome.meta.pruned:
            self._has_checked_first = True
            try:
                check(outcome)
            except ConfigurationError as error:
                self._error = ConfigurationError(f"{error}; the results are in {self.run.ledger.path}")

    def _warn_of_kept_sandbox(self, execution: Execution, kept_until: float) -> None:
        until = datetime.fromtimestamp(kept_until).astimezone()
        text = f"{self.run.plan.label(execution)}: its sandbox is kept until {until:%H:%M %Z}"
        if execution.inputs_failure:
            text += f", without its variables ({execution.inputs_failure})"
        self.warn(f"{text}: rlm-batch shell {self.run.ledger.path} {execution.index}")

    def _warn_of_missing_files(self, execution: Execution, not_collected: tuple[str, ...]) -> None:
        """Warn of files that were not collected, for the first executions with such files."""
        self._not_collected_count += 1
        if self._not_collected_count <= MAX_LOGGED_FAILURES:
            first, *others = not_collected
            more = f" (and {len(others):,} more)" if others else ""
            self.warn(f"{self.run.plan.label(execution)}: not collected: {first}{more}")

    def _log_failure(self, execution: Execution, error: RlmBatchError) -> None:
        """Count a failure, and log the first failures of each kind."""
        kind = type(error).__name__
        if isinstance(error, CodeError):
            kind += f" {escape_text(error.type[:MAX_TYPE_CHARS])}"
        self.failure_counts[kind] += 1
        count = self.failure_counts[kind]
        limit = 1 if isinstance(error, NotRun) else MAX_LOGGED_FAILURES
        if count <= limit:
            more = f"; the log shows no more failures with {kind}" if count == limit else ""
            text = "%s failed: %s: %s%s"
            self.run.log.warning(text, self.run.plan.label(execution), type(error).__name__, error.summary, more)
