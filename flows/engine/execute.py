"""The Prefect task that runs one or several executions, with retries that depend on the error's type."""

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
from ...tasks.task_log import OutputLog
from ...tasks.task_runs import (
    DELAY_COUNT,
    JITTER_FACTOR,
    build_tags,
    get_requested_wait,
    return_cancelled_state,
    show_tags,
    wait_as_requested,
)
from ..parameters import Options
from .failures import should_retry
from .lane import Lane

P = ParamSpec("P")

KEEP_SANDBOX_SECONDS = 10.0  # A lane keeps its sandbox during a shorter wait, because a new one may take as long.


class TaskBatch:
    """The executions of one task run, which runs them one after another.

    `label` is the task run's name. `on_start` is called when the task run begins its work. This is a plain class,
    because Prefect visits every field of a parameter that is a dataclass.
    """

    def __init__(self, label: str, executions: list[Execution], on_start: Callable[[], None]) -> None:
        self._label = label
        self._executions = executions
        self.on_start = on_start
        self.try_count = 0
        self.last_error: RlmBatchError | None = None  # the error of the last execution that failed and is not retried

    def __str__(self) -> str:
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

    Raises:
        PrepareError: The `prepare` code failed. The batch's remaining executions have no outcome.
        RlmBatchError: An error that is retried. Otherwise the error of the last execution that failed, so that the
            task run's state shows it.
    """
    show_tags(build_tags(lane.run.provider.provider_name))
    batch.try_count += 1
    if batch.try_count == 1:
        batch.on_start()
    retried_error = await _run_remaining(lane, batch)
    if retried_error is not None:
        wait = max(compute_backoff(batch.try_count - 1), get_requested_wait(retried_error))
        get_run_logger().warning(
            "%s is retried in %.0f s or more: %s: %s", batch, wait, type(retried_error).__name__, retried_error.summary
        )
        if wait > KEEP_SANDBOX_SECONDS:
            await lane.release_while_waiting()
        raise retried_error
    if batch.last_error is not None:
        raise batch.last_error


async def _run_remaining(lane: Lane, batch: TaskBatch) -> RlmBatchError | None:
    """Run the batch's remaining executions, and record their outcomes. Return the last error that is to be retried."""
    run = lane.run
    retried_error: RlmBatchError | None = None
    for number, execution in enumerate(batch.remaining_executions):
        if run.stop.has_too_many_failures:
            return None
        if number:
            await lane.release_if_wanted()
        try:
            run.sink.record(execution, await _attempt_execution(lane, execution))
        except PrepareError:
            raise  # This is not an outcome of an execution, and ends the flow run.
        except RlmBatchError as error:
            execution.errors.append(error)
            is_refused = isinstance(error, (QuotaExceeded, SandboxStartError))
            gets_no_sandboxes = is_refused and lane.is_start_timeout_over
            if should_retry(error, len(execution.errors), run.options):
                retried_error = error
                if gets_no_sandboxes or isinstance(error, QuotaExceeded):
                    break  # The next execution would be refused too.
            else:
                batch.last_error = error
                final_error = error if execution.ended is None else explain_last(error)
                run.sink.record(execution, Failure(final_error, error.meta or Meta()))
                if gets_no_sandboxes and not run.plan.stop_on_failure:
                    run.slots.end(error)
                    break
    return retried_error


async def _attempt_execution(lane: Lane, execution: Execution) -> Result:
    """Return the result of one attempt. If a check judges the execution, return the check's result.

    The check also judges an execution that failed, if its code reached a sandbox and no retry follows. If only the
    check failed, the next attempt runs only the check.
    """
    if not lane.has_check(execution):
        return await _run_code(lane, execution)
    if execution.ended is None:
        try:
            execution.ended = await _run_code(lane, execution)
        except RlmBatchError as error:
            if not is_judged(error) or should_retry(error, execution.attempt, lane.run.options):
                raise
            execution.ended = Failure(error, error.meta or Meta())
    return await _attempt(lane, partial(lane.check, execution))


async def _run_code(lane: Lane, execution: Execution) -> Result:
    """Return the result of one attempt without a check. The listener and the log get the output."""
    listener = lane.run.listener
    log = OutputLog(lane.run.log_lines, f"{execution.index}: ") if lane.run.options.log_output else None

    def write_output(stream: str, text: str) -> None:
        listener.on_output(execution.index, stream, text)
        if log is not None:
            log.write(stream, text)

    try:
        return await _attempt(lane, partial(lane.execute, execution, write_output))
    finally:
        if log is not None:
            log.close()


async def _attempt(lane: Lane, run: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of `run`. Call it again after a refusal that is not a failed attempt."""
    while True:
        try:
            return await run()
        except QuotaExceeded as error:
            if not lane.should_wait_out_refusal:
                raise
            if get_requested_wait(error) > KEEP_SANDBOX_SECONDS:
                await lane.release_while_waiting()


def configure_task(base: Task[P, Any], options: Options, tags: set[str], per_task: int) -> Task[P, Any]:
    """Return the task with these tags, and with the flow's retries for each of its `per_task` executions."""

    # This must be a function. With a partial or another callable object Prefect never retries, and does not say so.
    async def should_retry_task(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        error = await state.result(raise_on_failure=False)  # type: ignore[misc]
        attempt = 1
        if isinstance(error, RlmBatchError) and error.meta is not None:
            attempt = error.meta.attempt
        if not should_retry(error, attempt, options):
            return False
        await wait_as_requested(error)
        return True

    retries = options.retries
    return base.with_options(
        tags=tags,
        retries=retries * per_task,
        retry_delay_seconds=list(map(compute_backoff, range(min(retries, DELAY_COUNT)))) or 0,
        retry_jitter_factor=JITTER_FACTOR,
        retry_condition_fn=should_retry_task,  # type: ignore[arg-type]
    )
