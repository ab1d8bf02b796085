"""How executions fail that were not run to their end, and how a flow run fails of which some executions failed."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Self

from prefect.context import FlowRunContext

from ...sandbox.errors import CodeError, DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution
from ..plan import Outcomes

FIRST_FAILURES = 3  # of a run, if all that ended are these and all alike: a person hears before the rest fails too
MAX_TYPE_CHARS = 100  # of the name of an exception's type, which code chooses


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a flow run's time is over: the `seconds` that it was given, and the event loop's time when they end."""

    seconds: float | None
    at: float | None

    @classmethod
    def start(cls, seconds: float | None) -> Self:
        """A deadline in so many seconds from now; None for none."""
        return cls(seconds, None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def remaining_seconds(self) -> float | None:
        """The seconds until then; None without a deadline."""
        return None if self.at is None else self.at - asyncio.get_running_loop().time()

    def build_error(self, execution: Execution, reason: str) -> DeadlineExceeded:
        """The error of an execution that has no outcome by then."""
        return DeadlineExceeded(
            f"the flow run's deadline of {self.seconds:g} s {reason}"
            + (f" ({execution.earlier_errors[-1]})" if execution.errors else "")
            + f"; {describe_rerun()}, or give it more with deadline="
        )


@dataclass(slots=True)
class FailureWatch:
    """What a flow run's failures so far say: whether they are too many, and whether the first were all alike.

    `max_failures` is the parameter of that name, `total` the number of the flow run's executions.
    """

    max_failures: float | None
    total: int
    count: int = 0
    _succeeded: bool = False  # any of them
    _first_kinds: set[str] = field(default_factory=set[str])

    @property
    def limit(self) -> int | None:
        """How many failures are too many; None where none are."""
        if self.max_failures is None:
            return None
        count = self.max_failures if self.max_failures >= 1 else self.max_failures * self.total
        return max(1, math.ceil(count - 1e-9))  # 0.1 of 30 is 3.0000000000000004

    @property
    def is_limit_reached(self) -> bool:
        """Whether no execution is to be begun any more."""
        return self.limit is not None and self.count >= self.limit

    def add_outcome(self, outcome: Outcome) -> str | None:
        """Counts what an execution of this run has come to; a sentence where a person should hear of that at once."""
        if not isinstance(outcome, Failure):
            self._succeeded = True
            return None
        self.count += 1
        if self.count > FIRST_FAILURES:
            return None
        self._first_kinds.add(describe_kind(outcome.error))
        are_alike = self.count == FIRST_FAILURES < self.total and not self._succeeded and len(self._first_kinds) == 1
        if not are_alike or self.is_limit_reached:
            return None
        return (
            f"the first {FIRST_FAILURES} executions that ended all failed alike, the last with "
            f"{type(outcome.error).__name__}: {outcome.error.summary}"
            + ("; max_failures ends such a run early" if self.max_failures is None else "")
        )

    def build_error(self, execution: Execution) -> NotRun:
        """The error of an execution that has no outcome once the limit is reached."""
        return NotRun(
            f"not run: {self.count} of {self.total} executions have failed, and max_failures is {self.max_failures:g}"
            + (f" ({execution.earlier_errors[-1]})" if execution.errors else "")
            + f"; {describe_rerun()}, or give it more with max_failures="
        )


def describe_kind(error: RlmBatchError) -> str:
    """What is alike in errors of one kind: the type, and that of the exception that code has raised."""
    kind = type(error).__name__
    return f"{kind} {escape_text(error.type[:MAX_TYPE_CHARS])}" if isinstance(error, CodeError) else kind


def raise_failures(outcomes: Outcomes, noun: str, rerun_effect: str = "run only those that failed") -> None:
    """Raises ExecutionsFailed if there are failures: how many, the first of them, and where the results are.

    `noun` is what executions are called, in the plural; `rerun_effect` is what retrying the flow run does.
    """
    failures = outcomes.failures
    if failures:
        first = failures[0]
        idle = sum(isinstance(failure.error, NotRun) for failure in failures)
        rest = f" and {idle} not run" if idle else ""
        raise ExecutionsFailed(
            f"{len(failures) - idle} of {len(outcomes.results)} {noun} failed{rest}, first number {first.meta.index} "
            f"with {type(first.error).__name__}: {first.error.summary} -- the results are in {outcomes.results_path}; "
            f"{describe_rerun()} to {rerun_effect}, or pass on_failure='return' to get them beside the results",
            results=outcomes.results,
            failures=failures,
            results_path=outcomes.results_path,
        )


def find_first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of what made the lanes end, the error that a person has to read: ours before others."""
    error: BaseException = errors.subgroup(RlmBatchError) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_rerun() -> str:
    """How this flow run is run again: Prefect retries runs of deployments alone."""
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    return "retry the flow run" if deployed else "run it again with the same results_path"
