"""The Prefect task: one execution, or several in a row, with retries by the type of the error."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ..sandbox.errors import QuotaExceeded, RlmBatchError
from ..sandbox.result import Failure, Meta, Result
from .output import OutputLog, RunLines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
    from prefect.tasks import Task

    from .execution import Execution
    from .lane import Lane
    from .ledger import Ledger

TASK_NAME = "execute"
QUERY_NAME = "query"
BACKOFF = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds before each retry; the last stands for all later ones
JITTER = 0.5  # of the delay: lanes that were refused together do not come back together


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Leaves out that each task run has begun and completed, which its state says: it doubles what a task run costs."""
    return record.levelno > logging.INFO or getattr(record, "task_name", None) not in (TASK_NAME, QUERY_NAME)


logging.getLogger("prefect.task_runs").addFilter(_worth_a_line)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors are tried again, and how often."""

    retries: int = 2
    retry_code_errors: bool = False
    idempotent: bool = False

    def again(self, error: BaseException) -> bool:
        """Whether an execution that met this error may be tried again, by the error's type."""
        if not isinstance(error, RlmBatchError):
            return False
        return {
            "never": False,
            "if asked": self.retry_code_errors,
            "if idempotent": self.idempotent,
            "always": True,
        }[error.again]


class Work:
    """What one task run has to do: its executions, and where their outcomes go."""

    def __init__(
        self,
        label: str,
        executions: list[Execution],
        policy: RetryPolicy,
        ledger: Ledger,
        report: Callable[[Execution, Result | Failure], None],
        lines: RunLines | None = None,
    ) -> None:
        self._label = label
        self._executions = executions
        self.policy = policy
        self.ledger = ledger
        self._report = report
        self._lines = lines

    def __str__(self) -> str:
        return self._label

    @property
    def remaining(self) -> Iterable[Execution]:
        """The executions that have no outcome yet."""
        return [execution for execution in self._executions if not execution.done]

    @contextmanager
    def logged(self, execution: Execution) -> Iterator[Callable[[str, str], None] | None]:
        """What takes the output of an attempt at an execution to the task run's log, None where it is not wanted."""
        if self._lines is None:
            yield None
            return
        output = OutputLog(self._lines, "" if len(self._executions) == 1 else f"{execution.index}: ")
        try:
            yield output.write
        finally:
            output.close()

    def settle(self, execution: Execution, outcome: Result | Failure) -> None:
        """Writes an outcome to the ledger, and then reports it."""
        self.ledger.write(execution.key, outcome)
        execution.done = True
        self._report(execution, outcome)


@task(
    name=TASK_NAME,
    task_run_name="{work}",
    persist_result=False,  # results live in the ledger; Prefect's cache would merge replicates
    cache_policy=NO_CACHE,
    log_prints=False,
)
async def execute(lane: Lane, work: Work) -> None:
    """Runs the executions that have no outcome yet, in the lane's sandbox, and writes each outcome to the ledger.

    Raises the error of the last that failed, so that the task run's state shows it. An error that is tried again is
    raised before the others' count, and a retry runs only what has no outcome.
    """
    failed: RlmBatchError | None = None
    retry: RlmBatchError | None = None
    for number, execution in enumerate(work.remaining):
        if number and await lane.hand_over():
            await lane.enter()
        try:
            with work.logged(execution) as on_output:
                result = await lane.execute(execution, on_output)
            work.settle(execution, result)
        except RlmBatchError as error:
            execution.errors.append(error)
            if work.policy.again(error) and len(execution.errors) <= work.policy.retries:
                retry = error
                continue
            failed = error
            work.settle(execution, Failure(error, error.meta or Meta(index=execution.index)))
    if retry is not None:
        raise retry
    if failed is not None:
        raise failed


def with_policy(policy: RetryPolicy, provider: str) -> Task[[Lane, Work], Any]:
    """The task with a flow's retries, and the tags by which Prefect's own limits can hold it."""

    # A plain function: Prefect takes a partial, or an object that can be called, for "never", and says nothing.
    async def tried_again(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        if not policy.again(error):
            return False
        if isinstance(error, QuotaExceeded) and error.retry_after is not None:
            await asyncio.sleep(error.retry_after * random.uniform(1.0, 1.1))
        return True

    delays = [BACKOFF[min(number, len(BACKOFF) - 1)] for number in range(policy.retries)]
    return execute.with_options(
        tags={"sandbox", f"sandbox:{provider}"},
        retries=policy.retries,
        retry_delay_seconds=delays or 0,
        retry_jitter_factor=JITTER,
        retry_condition_fn=tried_again,  # type: ignore[arg-type]
    )
