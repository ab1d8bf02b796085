"""The shard flow: runs one shard of a job on a worker. Jobs with `shards` start it, and people do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache as cache_calls
from functools import partial
from typing import Annotated
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed
from pydantic import Field

from ..sandbox.errors import ConfigurationError, DeadlineExceeded, RlmBatchError
from ..tasks.ledger.ledger import Ledger
from ..tasks.ledger.result_index import ResultCache, find_ended_lines
from ..tasks.ledger.shards import ShardFiles
from .engine.executor import LaneExecutor
from .engine.opening import open_capacity
from .engine.outcome_sink import OutcomeSink
from .engine.run import make_run
from .engine.termination import cancel_at_termination
from .inputs.host_paths import locate_ledger
from .parameters import Options
from .plan import Plan, label_execution
from .prefect_flow import define_function_flow
from .sharding.shard_runs import HEARTBEAT_SECONDS

STATE_INTERVAL_SECONDS = 5.0  # seconds between two looks at the states of the own flow run
STOPPED_STATES = (StateType.CANCELLING, StateType.CANCELLED, StateType.CRASHED)


class _ShardStopped(Exception):
    """The job has cancelled this shard, or has started it again because it was silent."""


@define_function_flow("rlm-shard")
async def shard(
    work: Annotated[str, Field(description="File in the job's ledger that describes this shard's work.")],
    options: Annotated[Options, Field(description="Parameters of the job for this shard.")],
    files_digest: Annotated[
        str | None, Field(None, description="Hash of the host files that the job started with.")
    ] = None,
) -> State[None] | None:
    """Run the executions of one shard, and write their outcomes to the ledger of its job, which collects them.

    The run ends Completed even if executions failed, because the job reports failures. Its state is Cancelled if the
    job has stopped it, even before this process started, and is named after the error if the shard cannot run.
    """
    try:
        files = ShardFiles.from_work_path(work)
        files = replace(files, ledger=locate_ledger(files.ledger))
        with cancel_at_termination():
            async with _end_if_stopped():
                late_count = await _run_executions(files, options, files_digest)
    except _ShardStopped:
        return Cancelled(message="the job has stopped this shard")
    except RlmBatchError as error:
        return Failed(name=type(error).__name__, message=str(error))
    if late_count:
        return Failed(name=DeadlineExceeded.__name__, message=f"{late_count} executions had not ended at the deadline")
    return None


@asynccontextmanager
async def _end_if_stopped() -> AsyncIterator[None]:
    """Raise `_ShardStopped` in the context once the job has stopped this shard."""
    async with get_client() as client:
        await _check_states(client)  # A cancelled shard opens no sandbox.
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(_watch_states(client))
                yield
                task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def _watch_states(client: PrefectClient) -> None:
    while True:
        emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"})
        for _ in range(int(HEARTBEAT_SECONDS / STATE_INTERVAL_SECONDS)):
            await asyncio.sleep(STATE_INTERVAL_SECONDS)
            with suppress(httpx.HTTPError):
                await _check_states(client)


async def _check_states(client: PrefectClient) -> None:
    """Raise `_ShardStopped` if this flow run was ever cancelled, or set to Crashed."""
    # A process that starts after its cancellation sets its flow run to Running again, so earlier states count too.
    states = await client.read_flow_run_states(UUID(flow_run.id))
    if any(state.type in STOPPED_STATES for state in states):
        raise _ShardStopped


async def _run_executions(files: ShardFiles, options: Options, files_digest: str | None) -> int:
    """Run the executions of a shard. Return how many had not ended at the deadline."""
    header, executions = files.read_work()
    run = await make_run(options, Plan(total=header.total, label=partial(label_execution, header.what)))
    provider = run.provider
    if header.commit is not None:
        provider.pin(header.commit)
    if files_digest != await provider.compute_files_digest():
        paths = [*(options.python_path or ()), *map(str, (options.mounts or {}).values())]
        raise ConfigurationError(
            f"the files of python_path or mounts differ on this worker ({', '.join(paths)}): copy the "
            "same files to every worker, mounts with their modification times"
        )
    await provider.check()
    assert options.results_path is not None
    ledger = Ledger(locate_ledger(options.results_path), files.part_prefix)
    try:
        await asyncio.to_thread(ledger.create)
    except ConfigurationError as error:
        # The job has created it, so another attempt of the shard may succeed: an OSError lets the job start it again.
        raise OSError(str(error)) from error
    await run.start(ledger, flow_run.id, files.part_prefix)
    lines = await asyncio.to_thread(ledger.load_latest_lines, files.part_prefix)
    text = "shard %d of %d, with %d executions %s; results in %s"
    run.log.info(text, files.shard + 1, header.shards, header.total, await provider.describe_sandboxes(), ledger.path)
    run.sink = OutcomeSink(run, [])  # The shard needs no store, because the job reads the ledger.
    cache = ResultCache(ledger, lines)
    if run.check is not None:
        waiting = list(executions)
        executions = iter(waiting)
        keys = {execution.unchecked_key for execution in waiting}
        ended_lines = await asyncio.to_thread(find_ended_lines, ledger.read_lines(), keys)
        cache = ResultCache(
            ledger, lines, None, run.check, bool(options.collect), cache_calls(run.sink.warn), ended_lines
        )
    try:
        async with open_capacity(run):
            await LaneExecutor(run).execute_all(executions, cache.find_result)
    except BaseException:
        await run.flush_ledger_after_error()
        raise
    await asyncio.to_thread(ledger.close)
    return run.sink.failure_counts[DeadlineExceeded.__name__]
