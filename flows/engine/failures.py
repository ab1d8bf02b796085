"""Errors of executions that the deadline or `max_failures` ended, and of flow runs with failed executions."""

import asyncio
import math
from dataclasses import dataclass
from typing import Self

from prefect.context import FlowRunContext

from ...sandbox.errors import CodeError, DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.outcomes.text_escape import escape_text
from ...tasks.execution import Execution
from ..plan import Outcomes, Plan

MAX_TYPE_CHARS = 100  # characters of the name of an exception's type, which code chooses


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a flow run: `seconds` from its start, and `at` in the event loop's time. None without one."""

    seconds: float | None
    at: float | None

    @classmethod
    def start(cls, seconds: float | None) -> Self:
        """Return the deadline that many seconds from now."""
        return cls(seconds, None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def remaining_seconds(self) -> float | None:
        """Return the seconds until the deadline, or None without a deadline."""
        return None if self.at is None else self.at - asyncio.get_running_loop().time()

    def build_error(self, execution: Execution, reason: str) -> DeadlineExceeded:
        """Return the error of an execution that has no outcome at the deadline."""
        return DeadlineExceeded(
            f"the flow run's deadline of {self.seconds:g} s {reason}"
            + (f" ({execution.earlier_errors[-1]})" if execution.errors else "")
            + f"; {describe_rerun()}, or set a longer `deadline`"
        )


@dataclass(slots=True)
class FailureWatch:
    """The number of a flow run's failures. `max_failures` is the flow's parameter, `total` the number of executions."""

    max_failures: float | None
    total: int
    count: int = 0

    @property
    def limit(self) -> int | None:
        """The number of failures that ends the run, or None for no limit."""
        if self.max_failures is None:
            return None
        count = self.max_failures if self.max_failures >= 1 else self.max_failures * self.total
        return max(1, math.ceil(count - 1e-9))  # 0.1 of 30 is 3.0000000000000004

    @property
    def is_limit_reached(self) -> bool:
        """True if no further execution may start."""
        return self.limit is not None and self.count >= self.limit

    def build_error(self, execution: Execution) -> NotRun:
        """Return the error of an execution that has no outcome when the limit is reached."""
        return NotRun(
            f"not run: {self.count} of {self.total} executions failed, and `max_failures` is "
            f"{self.max_failures:g}"
            + (f" ({execution.earlier_errors[-1]})" if execution.errors else "")
            + f"; {describe_rerun()}, or set a higher `max_failures`"
        )


def describe_kind(error: RlmBatchError) -> str:
    """Return the kind of an error: its type, and the type of the exception that code raised."""
    kind = type(error).__name__
    return f"{kind} {escape_text(error.type[:MAX_TYPE_CHARS])}" if isinstance(error, CodeError) else kind


def raise_failures(outcomes: Outcomes, plan: Plan) -> None:
    """Raise ExecutionsFailed if there are failures, with their number, the first failure, and the results' path."""
    failures = outcomes.failures
    if failures:
        first = failures[0]
        not_run = sum(isinstance(failure.error, NotRun) for failure in failures)
        rest = f" and {not_run} did not run" if not_run else ""
        effect = "run only those that failed" if plan.state_context is None else "begin again with the first step"
        advice, nouns = getattr(first.error, "advice", ""), f"{plan.report_spec.noun}s"
        raise ExecutionsFailed(
            f"{len(failures) - not_run} of {len(outcomes.results)} {nouns} failed{rest}, the first is number "
            f"{first.meta.index}: {type(first.error).__name__}: {first.error.summary}"
            + (f" -- {escape_text(advice)}" if advice else "")
            + f" -- the results are in {outcomes.results_path}; {describe_rerun()} to {effect}, or pass "
            "on_failure='return' to get the failures beside the results",
            results=outcomes.results,
            failures=failures,
            results_path=outcomes.results_path,
        )


def find_first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first RlmBatchError of the group, or else its first error."""
    error: BaseException = errors.subgroup(RlmBatchError) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_rerun() -> str:
    """Return how to run this flow run again: Prefect retries only runs of deployments."""
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    return "retry the flow run" if deployed else "run it again with the same `results_path`"
