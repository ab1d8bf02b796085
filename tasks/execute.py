"""The Prefect task: one execution, or several in a row, with retries by the type of the error."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from ..sandbox.errors import QuotaExceeded, RlmBatchError
from ..sandbox.result import Failure, Meta, Result
from .concurrency_tags import limited, tag, tags_of
from .task_log import OutputLog, RunLines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
    from prefect.tasks import Task

    from .execution import Execution
    from .lane import Lane
    from .ledger.ledger import Ledger

TASK_NAME = "execute"
QUERY_NAME = "query"
BACKOFF = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds before each retry; the last stands for all later ones
JITTER = 0.5  # of the delay: lanes that were refused together do not come back together
KEEP_OPEN = 10.0  # seconds of waiting through which a lane keeps its sandbox: a new one takes about as long at worst


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Leaves out that each task run has begun and completed, which its state says: it doubles what a task run costs."""
    return record.levelno > logging.INFO or getattr(record, "task_name", None) not in (TASK_NAME, QUERY_NAME)


logging.getLogger("prefect.task_runs").addFilter(_worth_a_line)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors are tried again, how often, and until when (by the event loop's clock; None without a deadline)."""

    retries: int = 2
    retry_code_errors: bool = False
    idempotent: bool = False
    until: float | None = None

    def again(self, error: BaseException, attempt: int) -> bool:
        """Whether an execution whose attempt of that number, from 1, met this error is tried again: by its type."""
        if not isinstance(error, RlmBatchError) or attempt > self.retries:
            return False
        return {
            "never": False,
            "if asked": self.retry_code_errors,
            "if idempotent": self.idempotent,
            "always": True,
        }[error.again]

    def too_late(self, error: BaseException) -> bool:
        """Whether the provider asks to wait for longer than the flow run has."""
        return self.until is not None and asyncio.get_running_loop().time() + asked_wait(error) >= self.until


def asked_wait(error: BaseException) -> float:
    """The seconds that the provider asked to wait before it is tried again; 0 where it did not ask."""
    return (error.retry_after or 0.0) if isinstance(error, QuotaExceeded) else 0.0


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
        self.tries = 0
        self.failed: RlmBatchError | None = None  # the error of the last execution that failed for good
        self.begun: Callable[[], None] = lambda: None  # called when its task run has begun to do it

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
    raised before the others' count, and a retry runs only what has no outcome. A refusal for now ends the try: what
    comes after it would be refused too.
    """
    tag(tags_of(lane.provider.provider_name))
    work.tries += 1
    work.begun()
    retry: RlmBatchError | None = None
    for number, execution in enumerate(work.remaining):
        if number:
            await lane.hand_over()
        try:
            with work.logged(execution) as on_output:
                result = await _attempt(lane, work, execution, on_output)
            work.settle(execution, result)
        except RlmBatchError as error:
            execution.errors.append(error)
            if not work.policy.again(error, len(execution.errors)):
                work.failed = error
                work.settle(execution, Failure(error, error.meta or Meta(index=execution.index)))
                continue
            retry = error
            if isinstance(error, QuotaExceeded):
                break
    if retry is not None:
        wait = max(backoff(work.tries), asked_wait(retry))
        get_run_logger().warning(
            "%s is tried again in %.0f s or more: %s: %s", work, wait, type(retry).__name__, retry.summary
        )
        if wait > KEEP_OPEN:
            await lane.rest()
        raise retry
    if work.failed is not None:
        raise work.failed


async def _attempt(
    lane: Lane, work: Work, execution: Execution, on_output: Callable[[str, str], None] | None
) -> Result:
    """One attempt, however often its sandbox is refused while the run has others: it was not begun then."""
    while True:
        await lane.stay()
        try:
            return await lane.execute(execution, on_output)
        except QuotaExceeded as error:
            if not lane.waits_out(error) or work.policy.too_late(error):
                raise
            if asked_wait(error) > KEEP_OPEN:
                await lane.rest()


def backoff(number: int) -> float:
    """Seconds before the retry of that number, from 1, without jitter."""
    return BACKOFF[min(number, len(BACKOFF)) - 1]


async def with_policy(policy: RetryPolicy, provider: str, per_task: int) -> Task[[Lane, Work], Any]:
    """The task with a flow's retries, and the tags by which Prefect's own limits can hold it where there are such.

    `per_task` is how many executions a task run carries at most: each has its own retries.
    """

    # A plain function: Prefect takes a partial, or an object that can be called, for "never", and says nothing.
    async def tried_again(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        attempt = error.meta.attempt if isinstance(error, RlmBatchError) and error.meta is not None else 1
        if not policy.again(error, attempt) or policy.too_late(error):
            return False
        await asyncio.sleep(asked_wait(error) * random.uniform(1.0, 1.1))  # not all come back at once
        return True

    tags = tags_of(provider)
    return execute.with_options(
        tags=tags if await limited(tags) else set(),
        retries=policy.retries * per_task,
        # Prefect takes fifty at most, and goes on with the last of them.
        retry_delay_seconds=[backoff(number + 1) for number in range(min(policy.retries, len(BACKOFF)))] or 0,
        retry_jitter_factor=JITTER,
        retry_condition_fn=tried_again,  # type: ignore[arg-type]
    )
