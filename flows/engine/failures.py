"""The consequences of failed executions: retries, the end of the flow run, and its error."""

import asyncio
import math
from dataclasses import dataclass

from prefect.context import FlowRunContext

from ...sandbox.errors import DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.outcomes.text_escape import escape_text
from ...tasks.execution import Execution
from ..parameters import Options
from ..plan import Outcomes, Plan


@dataclass(slots=True)
class StopConditions:
    """The deadline of a flow run, and the number of failures after which no execution starts.

    The time until the deadline begins when this object is made.
    """

    options: Options
    total: int  # executions
    ends_at: float | None = None  # the deadline in the event loop's time
    failed_count: int = 0

    def __post_init__(self) -> None:
        if self.options.deadline is not None:
            self.ends_at = asyncio.get_running_loop().time() + self.options.deadline

    @property
    def failure_limit(self) -> int | None:
        """The number of failures that ends the run, or None for no limit."""
        limit = self.options.max_failures
        if limit is None:
            return None
        if limit < 1:
            limit *= self.total  # It is a share of the executions.
        return max(1, math.ceil(limit - 1e-9))  # 0.1 * 30 is 3.0000000000000004.

    @property
    def has_too_many_failures(self) -> bool:
        """True if no further execution may start."""
        limit = self.failure_limit
        return limit is not None and self.failed_count >= limit

    def build_error(self, execution: Execution) -> RlmBatchError:
        """Return the error of an unfinished execution: too many failures ended the run, or its deadline passed."""
        last_error = f" ({execution.earlier_errors[-1]})" if execution.errors else ""
        if self.has_too_many_failures:
            return NotRun(
                f"not run: {self.failed_count} of {self.total} executions failed, and `max_failures` is "
                f"{self.options.max_failures:g}{last_error}; {describe_rerun()}, or set a higher `max_failures`"
            )
        return DeadlineExceeded(
            f"the flow run's deadline of {self.options.deadline:g} s passed before this execution had "
            f"ended{last_error}; {describe_rerun()}, or set a longer `deadline`"
        )


def should_retry(error: BaseException, attempt: int, options: Options) -> bool:
    """Return whether to retry after an attempt, counted from 1, that ended with this error."""
    if not isinstance(error, RlmBatchError) or attempt > options.retries:
        return False
    return {
        "never": False,
        "if asked": options.retry_code_errors,
        "if idempotent": options.idempotent,
        "always": True,
    }[error.retry_rule]


def raise_failures(outcomes: Outcomes, plan: Plan) -> None:
    """Raise ExecutionsFailed if there are failures, with their number, the first failure, and the results' path."""
    failures = outcomes.failures
    if not failures:
        return
    first = failures[0]
    not_run_count = sum(isinstance(failure.error, NotRun) for failure in failures)
    failed_count = len(failures) - not_run_count
    noun = "execution" if outcomes.results[-1].meta.is_reduction else plan.report_spec.noun
    text = f"{failed_count} of {len(outcomes.results)} {noun}s failed"
    if not_run_count:
        text += f" and {not_run_count} did not run"
    text += f", the first is number {first.meta.index}: {type(first.error).__name__}: {first.error.summary}"
    advice = getattr(first.error, "advice", "")
    if advice:
        text += f" -- {escape_text(advice)}"
    effect = "run only those that failed" if plan.state_context is None else "begin again with the first step"
    raise ExecutionsFailed(
        f"{text} -- the results are in {outcomes.results_path}; {describe_rerun()} to {effect}, or pass "
        "on_failure='return' to get the failures beside the results",
        results=outcomes.results,
        failures=failures,
        results_path=outcomes.results_path,
    )


def find_first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the group's first RlmBatchError, or its first error if it has none."""
    error: BaseException = errors.subgroup(RlmBatchError) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_rerun() -> str:
    """Return how to run this flow run again."""
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is not None and run.deployment_id is not None:  # Prefect retries only runs of deployments.
        return "retry the flow run"
    return "run it again with the same `results_path`"
