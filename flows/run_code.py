"""The task `run_code`: one execution in a sandbox, for a user's own flows."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar

from prefect import tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import flow_run, task_run
from prefect.tasks import Task

from ..blocks.provider import SandboxProvider
from ..blocks.registry import find_provider_name, resolve_provider
from ..blocks.retry import compute_backoff
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.meta import Meta
from ..sandbox.requests.execution_request import check_patterns
from ..sandbox.requests.function_code import convert_code
from ..sandbox.result import Failure, Outcome, Result
from ..sandbox.wire.strict_json import NotJsonError, convert_fields
from ..tasks.capacity.slots import open_slots
from ..tasks.engine_log import shorten_engine_log
from ..tasks.execution import Execution, assign_keys
from ..tasks.ledger.ledger import Ledger
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.run_record import RunRecord, list_run_records
from ..tasks.task_log import LineBudget, OutputLog
from ..tasks.task_runs import DELAY_COUNT, JITTER_FACTOR, build_tags, wait_as_requested
from .engine.failures import should_retry
from .engine.lane import Lane, ProviderUnusable
from .engine.run import Run, make_run
from .engine.termination import cancel_at_interrupt
from .inputs.conversion import check_code
from .inputs.host_paths import locate_ledger
from .inputs.readers import check_variables
from .parameters import Options
from .plan import Plan
from .prefect_flow import run_now

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2  # the flows' default


async def _should_retry(own_task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether Prefect retries a failed task run. The error's type and the call's parameters decide."""
    context = TaskRunContext.get()
    parameters = {} if context is None else context.parameters
    options = Options(
        retries=own_task.retries or 0,
        retry_code_errors=bool(parameters.get("retry_code_errors")),
        idempotent=bool(parameters.get("idempotent")),
    )
    error = await state.result(raise_on_failure=False)  # type: ignore[misc]
    if not should_retry(error, run.run_count, options):
        return False
    await wait_as_requested(error)
    return True


class _SandboxTask(Task[P, R]):
    """A task whose runs have the tags of their provider from the start, so that Prefect's tag limits hold for them."""

    def sync(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run the task from code that is not async. Raises ConfigurationError in a running event loop."""
        task: Any = self
        return run_now(self.fn.__name__, lambda: task(*args, **kwargs))

    def with_options(self, **options: Any) -> "_SandboxTask[P, R]":  # type: ignore[override]
        """Return a copy of the task with other options of Prefect's."""
        return tag_with_provider(super().with_options(**options))

    async def create_run(self, *args: Any, **options: Any) -> TaskRun:
        """Create a task run for a task worker, which executes it later."""
        with tags(*_list_tags(options)):
            return await super().create_run(*args, **options)

    async def create_local_run(self, *args: Any, **options: Any) -> TaskRun:
        """Create a task run that this process executes."""
        with tags(*_list_tags(options)):
            return await super().create_local_run(*args, **options)


def _list_tags(options: Mapping[str, Any]) -> set[str]:
    """Return the tags of the run that Prefect creates with these options."""
    parameters: dict[str, Any] = options.get("parameters") or {}
    return build_tags(find_provider_name(parameters.get("provider", "local")))


def tag_with_provider(base: Task[P, R]) -> _SandboxTask[P, R]:
    """Return a copy of a task whose runs have the tags of their parameter `provider`."""
    tagged: _SandboxTask[P, R] = object.__new__(_SandboxTask)
    vars(tagged).update(vars(base))
    return tagged


@tag_with_provider
@task(
    name="run code",
    persist_result=False,
    cache_policy=NO_CACHE,  # Prefect's own policy would reuse results for equal code.
    retries=RETRIES,
    retry_delay_seconds=list(map(compute_backoff, range(DELAY_COUNT))),
    retry_jitter_factor=JITTER_FACTOR,
    retry_condition_fn=_should_retry,  # type: ignore[arg-type]
)
async def run_code(
    code: str | Callable[..., object],
    variables: Mapping[str, Any] | None = None,
    *,
    provider: str | SandboxProvider = "local",
    provider_options: dict[str, Any] | None = None,
    timeout: float = 120,
    retry_code_errors: bool = False,
    idempotent: bool = False,
    results_path: str | PurePath | None = None,
    collect: list[str] | None = None,
) -> Result:
    """Run one piece of code in its own sandbox: a task for a user's own flows.

    The task run's log has what the code prints. Failed sandboxes are retried twice, or as often as
    `run_code.with_options(retries=...)` says. The outcome is written to a ledger, and not read from it again.

    Args:
        code: The code, or a function, whose source is sent.
        variables: Global names of the code, or the function's arguments.
        provider: A provider's name or a block, which need not be saved.
        provider_options: Settings that override the provider's.
        timeout: Seconds that the code may take, 120 by default.
        retry_code_errors: Retry errors that the code raises.
        idempotent: The code may run again if its outcome is unknown.
        results_path: The ledger's directory or location; by default one for the flow run below the results root.
        collect: Patterns of files of the working folder, which go to `files` in the ledger.

    Returns:
        The code's result.

    Raises:
        CodeError: The code raised an error. Other failures of an execution are other subclasses of RlmBatchError.
        ConfigurationError: A parameter is wrong.
    """
    shorten_engine_log(task_run.id)
    text: str = convert_code(code)
    try:
        json_variables = convert_fields(dict(variables or {}), allow_nonfinite=True)
    except NotJsonError as error:
        raise ConfigurationError(str(error)) from None
    check_code(text)
    check_variables(text, [json_variables])
    options = Options(timeout=timeout, collect=check_patterns(collect))
    run = await make_run(options, Plan(total=1), await resolve_provider(provider, provider_options))
    await run.check_before_start()
    run_id = flow_run.id or task_run.id
    ledger = Ledger(get_results_root() / run_id if results_path is None else locate_ledger(results_path))
    await run.start(ledger, run_id)
    if await asyncio.to_thread(_create_ledger, ledger, run):
        run.log.info("%s; results in %s", run.environment, ledger.path)
    # The task run is in the key, so equal calls have different keys.
    fingerprint = {**await run.provider.fingerprint(), "task_run": task_run.id}
    (execution,) = assign_keys([(text, json_variables)], fingerprint)
    output = OutputLog(LineBudget(), f"{task_run.name}: ")
    outcome: Outcome
    try:
        outcome = await _execute(run, execution, output)
    except RlmBatchError as error:
        outcome = Failure(error, error.meta or Meta(variables=execution.variables, provider=run.provider.provider_name))
    finally:
        output.close()
    # Other processes may run executions of the same flow run, so there is no index.
    outcome.meta = replace(outcome.meta, index=None, attempt=task_run.run_count or 1)
    try:
        ledger.write_outcome(execution.key, outcome)
    finally:
        await asyncio.shield(asyncio.to_thread(ledger.close))
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


async def _execute(run: Run, execution: Execution, output: OutputLog) -> Result:
    """Run the execution in a new sandbox. Raises its error, or the provider's error if no sandbox opens."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(cancel_at_interrupt(task))
    try:
        async with open_slots(run.provider, run.run_id, run.log) as slots:
            lane = Lane(run, slots)
            try:
                return await lane.execute(execution, output.write)
            except ProviderUnusable as error:
                raise error.__cause__ or error from None
            finally:
                await lane.release()
    finally:
        watcher.cancel()


def _create_ledger(ledger: Ledger, run: Run) -> bool:
    """Create the ledger and the run's record, unless another task run has. Return whether this one created them."""
    ledger.create()
    if list_run_records(ledger.path):
        return False
    RunRecord(
        flow=flow_run.flow_name or run_code.name,
        results_path=str(ledger.path),
        flow_run_id=run.run_id,
        name=flow_run.name or task_run.name or "",
        provider=run.provider.provider_name,
        began=time.time(),
        id=run.run_id.replace("-", "")[:12],
    ).write()
    return True
