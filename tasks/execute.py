"""The Prefect task: one execution, or several in a row, with retries by the type of the error."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, ParamSpec

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from ..sandbox.errors import PrepareError, QuotaExceeded, RlmBatchError, SandboxStartError
from ..sandbox.meta import Meta
from ..sandbox.result import Failure, Result
from .cancellation import return_cancelled_state
from .concurrency_tags import add_tags, build_tags, has_tag_limit
from .execution import Execution
from .lane import Lane, ProviderUnusable
from .retry import BACKOFF_SECONDS, JITTER_FACTOR, RetryPolicy, compute_backoff, get_requested_wait
from .task_batch import TaskBatch
from .task_log import EXECUTE_TASK_NAME

P = ParamSpec("P")

KEEP_SANDBOX_SECONDS = 10.0  # of waiting through which a lane keeps its sandbox: a new one takes as long at worst


@task(
    name=EXECUTE_TASK_NAME,
    task_run_name="{batch}",
    persist_result=False,  # results live in the ledger; Prefect's cache would merge replicates
    cache_policy=NO_CACHE,
    log_prints=False,
)
@return_cancelled_state
async def execute(lane: Lane, batch: TaskBatch) -> None:
    """Runs the executions that have no outcome yet, in the lane's sandbox, and writes each outcome to the ledger.

    Raises the error of the last that failed, so that the task run's state shows it; an error that is retried comes
    before those. A retry runs only what has no outcome. A refusal for now ends the try, and so does a provider that has
    opened no sandbox for its `start_timeout`: what comes after it would be refused too. PrepareError is no outcome of
    an execution's: whatever has none then is left without one.
    """
    add_tags(build_tags(lane.provider.provider_name))
    batch.start_try()
    retry_error: RlmBatchError | None = None
    for number, execution in enumerate(batch.remaining_executions):
        if batch.should_end():
            retry_error = None
            break
        if number:
            await lane.release_if_wanted()
        try:
            with batch.open_output_log(execution) as on_output:
                result = await _attempt_execution(lane, batch, execution, on_output)
            batch.record_outcome(execution, result)
        except PrepareError:
            raise  # no execution's: it ends the flow run
        except RlmBatchError as error:
            execution.errors.append(error)
            if batch.policy.should_retry(error, len(execution.errors)):
                retry_error = error
                if isinstance(error, QuotaExceeded):
                    break
            else:
                batch.last_error = error
                batch.record_outcome(execution, Failure(error, error.meta or Meta(index=execution.index)))
            if isinstance(error, SandboxStartError) and lane.is_start_timeout_over:
                break
    if retry_error is not None:
        wait = max(compute_backoff(batch.try_count), get_requested_wait(retry_error))
        get_run_logger().warning(
            "%s is tried again in %.0f s or more: %s: %s", batch, wait, type(retry_error).__name__, retry_error.summary
        )
        if wait > KEEP_SANDBOX_SECONDS:
            await lane.release_while_waiting()
        raise retry_error
    if batch.last_error is not None:
        raise batch.last_error


async def _attempt_execution(
    lane: Lane, batch: TaskBatch, execution: Execution, on_output: Callable[[str, str], None] | None
) -> Result:
    """The result of one attempt. A sandbox that is refused while the run has others does not count as one."""
    while True:
        await lane.acquire_for_work()
        try:
            return await lane.execute(execution, on_output)
        except (QuotaExceeded, ProviderUnusable) as error:
            if not lane.should_wait_out(error) or batch.policy.is_too_late(error):
                raise
            if get_requested_wait(error) > KEEP_SANDBOX_SECONDS:
                await lane.release_while_waiting()


async def configure_task(base: Task[P, Any], policy: RetryPolicy, provider: str, per_task: int = 1) -> Task[P, Any]:
    """The task with a flow's retries, and with tags where the server has a limit on them.

    `per_task` is the most executions that a task run has: each has its own retries.
    """

    # A plain function: Prefect takes a partial, or an object that can be called, for "never", and says nothing.
    async def should_retry_task(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        attempt = error.meta.attempt if isinstance(error, RlmBatchError) and error.meta is not None else 1
        if not policy.should_retry(error, attempt) or policy.is_too_late(error):
            return False
        await asyncio.sleep(get_requested_wait(error) * random.uniform(1.0, 1.1))  # not all come back at once
        return True

    tags = build_tags(provider)
    return base.with_options(
        tags=tags if await has_tag_limit(tags) else set(),
        retries=policy.retries * per_task,
        # Prefect takes fifty at most, and goes on with the last of them.
        retry_delay_seconds=[compute_backoff(number + 1) for number in range(min(policy.retries, len(BACKOFF_SECONDS)))]
        or 0,
        retry_jitter_factor=JITTER_FACTOR,
        retry_condition_fn=should_retry_task,  # type: ignore[arg-type]
    )
