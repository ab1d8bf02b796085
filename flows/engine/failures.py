"""How executions fail that were not run to their end, and how a flow run fails of which some executions failed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from prefect.context import FlowRunContext

from ...sandbox.errors import DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Every execution's outcome, in order, and where they are written."""

    results: Sequence[Outcome]
    failures: Sequence[Failure]  # those of the results that failed for good
    results_path: str


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
