"""The Prefect task: one execution, or several in a row, with retries by the type of the error."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from ..sandbox.errors import QuotaExceeded, RlmBatchError
from ..sandbox.meta import Meta
from ..sandbox.result import Failure, Outcome, Result
from .concurrency_tags import add_tags, build_tags, has_tag_limit
from .retry import (
    BACKOFF_SECONDS,
    JITTER_FACTOR,
    RetryPolicy,
    compute_backoff,
    get_requested_wait,
)
from .task_log import LineBudget, OutputLog

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
    from prefect.tasks import Task

    from .execution import Execution
    from .lane import Lane
    from .ledger.ledger import Ledger

EXECUTE_TASK_NAME = "execute"
QUERY_TASK_NAME = "query"
KEEP_SANDBOX_SECONDS = 10.0  # of waiting through which a lane keeps its sandbox: a new one takes as long at worst


class _StartAndEndFilter(logging.Filter):
    """Drops Prefect's lines that a task run has begun and completed: its state says so, and they double its cost."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or getattr(record, "task_name", None) not in (
            EXECUTE_TASK_NAME,
            QUERY_TASK_NAME,
        )


def install_task_run_log_filter() -> None:
    """Keeps the start and the end of our task runs out of the log. Calling it again changes nothing."""
    logger = logging.getLogger("prefect.task_runs")
    if not any(isinstance(present, _StartAndEndFilter) for present in logger.filters):
        logger.addFilter(_StartAndEndFilter())


class TaskBatch:
    """What one task run has to do: its executions, and where their outcomes go."""

    def __init__(
        self,
        label: str,
        executions: list[Execution],
        policy: RetryPolicy,
        *,
        ledger: Ledger,
        on_start: Callable[[], None],
        on_outcome: Callable[[Execution, Outcome], None],
        line_budget: LineBudget | None,
    ) -> None:
        self._label = label
        self._executions = executions
        self.policy = policy
        self.ledger = ledger
        self._on_start = on_start
        self._on_outcome = on_outcome
        self._line_budget = line_budget
        self.try_count = 0
        self.last_error: RlmBatchError | None = None  # the error of the last execution that failed for good

    def __str__(self) -> str:
        return self._label

    @property
    def remaining_executions(self) -> Iterable[Execution]:
        """The executions that have no outcome yet."""
        return [execution for execution in self._executions if not execution.is_done]

    def start_try(self) -> None:
        """Counts a try of the task run, and reports the first."""
        self.try_count += 1
        if self.try_count == 1:
            self._on_start()

    @contextmanager
    def open_output_log(self, execution: Execution) -> Iterator[Callable[[str, str], None] | None]:
        """What takes the output of an attempt at an execution to the task run's log, None where it is not wanted."""
        if self._line_budget is None:
            yield None
            return
        output = OutputLog(self._line_budget, "" if len(self._executions) == 1 else f"{execution.index}: ")
        try:
            yield output.write
        finally:
            output.close()

    def record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Writes an outcome to the ledger, and then reports it."""
        self.ledger.write_outcome(execution.key, outcome)
        execution.is_done = True
        self._on_outcome(execution, outcome)


@task(
    name=EXECUTE_TASK_NAME,
    task_run_name="{batch}",
    persist_result=False,  # results live in the ledger; Prefect's cache would merge replicates
    cache_policy=NO_CACHE,
    log_prints=False,
)
async def execute(lane: Lane, batch: TaskBatch) -> None:
    """Runs the executions that have no outcome yet, in the lane's sandbox, and writes each outcome to the ledger.

    Raises the error of the last that failed, so that the task run's state shows it. An error that is tried again is
    raised before the others' count, and a retry runs only what has no outcome. A refusal for now ends the try: what
    comes after it would be refused too.
    """
    add_tags(build_tags(lane.provider.provider_name))
    batch.start_try()
    retry: RlmBatchError | None = None
    for number, execution in enumerate(batch.remaining_executions):
        if number:
            await lane.release_if_wanted()
        try:
            with batch.open_output_log(execution) as on_output:
                result = await _attempt(lane, batch, execution, on_output)
            batch.record_outcome(execution, result)
        except RlmBatchError as error:
            execution.errors.append(error)
            if not batch.policy.should_retry(error, len(execution.errors)):
                batch.last_error = error
                batch.record_outcome(execution, Failure(error, error.meta or Meta(index=execution.index)))
                continue
            retry = error
            if isinstance(error, QuotaExceeded):
                break
    if retry is not None:
        wait = max(compute_backoff(batch.try_count), get_requested_wait(retry))
        get_run_logger().warning(
            "%s is tried again in %.0f s or more: %s: %s", batch, wait, type(retry).__name__, retry.summary
        )
        if wait > KEEP_SANDBOX_SECONDS:
            await lane.release_while_waiting()
        raise retry
    if batch.last_error is not None:
        raise batch.last_error


async def _attempt(
    lane: Lane, batch: TaskBatch, execution: Execution, on_output: Callable[[str, str], None] | None
) -> Result:
    """One attempt, however often its sandbox is refused while the run has others: it was not begun then."""
    while True:
        await lane.acquire_for_work()
        try:
            return await lane.execute(execution, on_output)
        except QuotaExceeded as error:
            if not lane.should_wait_out(error) or batch.policy.is_too_late(error):
                raise
            if get_requested_wait(error) > KEEP_SANDBOX_SECONDS:
                await lane.release_while_waiting()


async def build_execute_task(policy: RetryPolicy, provider: str, per_task: int) -> Task[[Lane, TaskBatch], Any]:
    """The task with a flow's retries, and the tags by which Prefect's own limits can hold it where there are such.

    `per_task` is how many executions a task run carries at most: each has its own retries.
    """

    # A plain function: Prefect takes a partial, or an object that can be called, for "never", and says nothing.
    async def tried_again(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        attempt = error.meta.attempt if isinstance(error, RlmBatchError) and error.meta is not None else 1
        if not policy.should_retry(error, attempt) or policy.is_too_late(error):
            return False
        await asyncio.sleep(get_requested_wait(error) * random.uniform(1.0, 1.1))  # not all come back at once
        return True

    tags = build_tags(provider)
    return execute.with_options(
        tags=tags if await has_tag_limit(tags) else set(),
        retries=policy.retries * per_task,
        # Prefect takes fifty at most, and goes on with the last of them.
        retry_delay_seconds=[compute_backoff(number + 1) for number in range(min(policy.retries, len(BACKOFF_SECONDS)))]
        or 0,
        retry_jitter_factor=JITTER_FACTOR,
        retry_condition_fn=tried_again,  # type: ignore[arg-type]
    )
