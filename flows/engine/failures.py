"""Errors of executions that the deadline or `max_failures` ended, and of flow runs with failed executions."""

import asyncio
import math
from dataclasses import dataclass
from typing import Self

from prefect.context import FlowRunContext

from ...sandbox.errors import DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.outcomes.text_escape import escape_text
from ...tasks.execution import Execution
from ..parameters import Options
from ..plan import Outcomes, Plan


@dataclass(slots=True)
class StopConditions:
    """The deadline of a flow run, and the number of failures after which no execution starts.

    `ends_at` is the deadline in the event loop's time, or None.
    """

    options: Options
    total: int  # executions
    ends_at: float | None
    failed_count: int = 0

    @classmethod
    def start(cls, options: Options, total: int) -> Self:
        """Return the conditions of a flow run that starts now."""
        deadline = options.deadline
        return cls(options, total, None if deadline is None else asyncio.get_running_loop().time() + deadline)

    @property
    def failure_limit(self) -> int | None:
        """The number of failures that ends the run, or None for no limit."""
        count = self.options.max_failures
        if count is None:
            return None
        return max(1, math.ceil((count if count >= 1 else count * self.total) - 1e-9))  # 0.1 * 30 is 3.0000000000000004

    @property
    def has_too_many_failures(self) -> bool:
        """True if no further execution may start."""
        return self.options.max_failures is not None and self.failed_count >= (self.failure_limit or 0)

    def build_error(self, execution: Execution) -> RlmBatchError:
        """Return the error of an unfinished execution: too many failures ended the run, or its deadline passed."""
        earlier = f" ({execution.earlier_errors[-1]})" if execution.errors else ""
        if self.has_too_many_failures:
            return NotRun(
                f"not run: {self.failed_count} of {self.total} executions failed, and `max_failures` is "
                f"{self.options.max_failures:g}{earlier}; {describe_rerun()}, or set a higher `max_failures`"
            )
        return DeadlineExceeded(
            f"the flow run's deadline of {self.options.deadline:g} s passed before this execution had ended{earlier}; "
            f"{describe_rerun()}, or set a longer `deadline`"
        )


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
