"""The Prefect task that runs one or several executions, with retries that depend on the error's type."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ParamSpec

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from ...blocks.retry import compute_backoff
from ...sandbox.errors import PrepareError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.meta import Meta
from ...sandbox.result import Failure, Result
from ...tasks.check import explain_last, is_judged
from ...tasks.engine_log import EXECUTE_TASK_NAME
from ...tasks.execution import Execution
from ...tasks.retry import DELAY_COUNT, JITTER_FACTOR, RetryPolicy, get_requested_wait
from ...tasks.task_log import OutputLog
from ...tasks.task_runs import build_tags, return_cancelled_state, show_tags
from .lane import Lane

P = ParamSpec("P")

KEEP_SANDBOX_SECONDS = 10.0  # A lane keeps its sandbox during a shorter wait, because a new one may take as long.


class TaskBatch:
    """Executions that one task run runs one after another. `on_start` is called when the task run begins its work.

    This is a plain class, because Prefect visits every field of a parameter that is a dataclass.
    """

    def __init__(self, label: str, executions: list[Execution], on_start: Callable[[], None]) -> None:
        self._label = label
        self._executions = executions
        self.on_start = on_start
        self.try_count = 0
        self.last_error: RlmBatchError | None = None  # the error of the last execution that failed for good

    def __str__(self) -> str:
        """Return the task run's name."""
        return self._label

    @property
    def remaining_executions(self) -> list[Execution]:
        """The executions that have no outcome yet."""
        return [execution for execution in self._executions if not execution.is_done]


@task(
    name=EXECUTE_TASK_NAME,
    task_run_name="{batch}",
    persist_result=False,  # The ledger has the results. Prefect's cache would merge equal executions.
    cache_policy=NO_CACHE,
    log_prints=False,
)
@return_cancelled_state
async def execute(lane: Lane, batch: TaskBatch) -> None:
    """Run the batch's executions that have no outcome yet, in the lane's sandbox, and record each outcome.

    A temporary refusal ends the try. If the provider opened no sandbox within its `start_timeout`, the run opens no
    more, because the next execution would get none either. PrepareError is not an outcome of an execution: the
    remaining executions of the batch have no outcome then.

    Raises:
        RlmBatchError: An error that is retried. Otherwise the error of the last execution that failed, so that the
            task run's state shows it.
    """
    show_tags(build_tags(lane.run.provider.provider_name))
    batch.try_count += 1
    if batch.try_count == 1:
        batch.on_start()
    retry_error: RlmBatchError | None = None
    for number, execution in enumerate(batch.remaining_executions):
        if lane.run.stop.has_too_many_failures:
            retry_error = None
            break
        if number:
            await lane.release_if_wanted()
        try:
            lane.run.sink.record(execution, await _attempt_execution(lane, execution))
        except PrepareError:
            raise  # This is not an outcome of an execution, and ends the flow run.
        except RlmBatchError as error:
            execution.errors.append(error)
            is_refused = isinstance(error, (QuotaExceeded, SandboxStartError)) and lane.is_start_timeout_over
            if lane.run.policy.should_retry(error, len(execution.errors)):
                retry_error = error
                if is_refused or isinstance(error, QuotaExceeded):
                    break
            else:
                batch.last_error = error
                last = error if execution.ended is None else explain_last(error)
                lane.run.sink.record(execution, Failure(last, error.meta or Meta()))
                if is_refused and not lane.run.plan.stop_on_failure:
                    lane.run.slots.end(error)
                    break
    if retry_error is not None:
        wait = max(compute_backoff(batch.try_count - 1), get_requested_wait(retry_error))
        get_run_logger().warning(
            "%s is retried in %.0f s or more: %s: %s", batch, wait, type(retry_error).__name__, retry_error.summary
        )
        if wait > KEEP_SANDBOX_SECONDS:
            await lane.release_while_waiting()
    if (error := retry_error or batch.last_error) is not None:
        raise error


async def _attempt_execution(lane: Lane, execution: Execution) -> Result:
    """Return the result of one attempt. If a check judges the execution, this is the check's result.

    The check judges an execution that failed too, if its code began and no retry follows. A retry after the check
    failed runs only the check.
    """
    if not lane.has_check(execution):
        return await _run_code(lane, execution)
    if execution.ended is None:
        try:
            execution.ended = await _run_code(lane, execution)
        except RlmBatchError as error:
            if not is_judged(error) or lane.run.policy.should_retry(error, execution.attempt):
                raise
            execution.ended = Failure(error, error.meta or Meta())
    return await _attempt(lane, partial(lane.check, execution))


async def _run_code(lane: Lane, execution: Execution) -> Result:
    """Return the result of one attempt, without a check."""

    options, listener = lane.run.options, lane.run.listener
    log = OutputLog(lane.run.log_lines, f"{execution.index}: ") if options.log_output else None

    def write(stream: str, text: str) -> None:
        listener.on_output(execution.index, stream, text)
        if log is not None:
            log.write(stream, text)

    try:
        return await _attempt(lane, partial(lane.execute, execution, write))
    finally:
        if log is not None:
            log.close()


async def _attempt(lane: Lane, run: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of `run`. A refused sandbox is not an attempt while the flow run has others."""
    while True:
        try:
            return await run()
        except QuotaExceeded as error:
            if not lane.should_wait_out_refusal:
                raise
            if get_requested_wait(error) > KEEP_SANDBOX_SECONDS:
                await lane.release_while_waiting()


def configure_task(base: Task[P, Any], policy: RetryPolicy, tags: set[str], per_task: int = 1) -> Task[P, Any]:
    """Return the task with a flow's retries, for each of its `per_task` executions, and with tags."""

    # This must be a function. With a partial or another callable object Prefect never retries, and does not say so.
    async def should_retry_task(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        attempt = error.meta.attempt if isinstance(error, RlmBatchError) and error.meta is not None else 1
        if not policy.should_retry(error, attempt):
            return False
        # Lanes that were refused together should not return together.
        await asyncio.sleep(get_requested_wait(error) * random.uniform(1.0, 1.1))
        return True

    return base.with_options(
        tags=tags,
        retries=policy.retries * per_task,
        retry_delay_seconds=list(map(compute_backoff, range(min(policy.retries, DELAY_COUNT)))) or 0,
        retry_jitter_factor=JITTER_FACTOR,
        retry_condition_fn=should_retry_task,  # type: ignore[arg-type]
    )
