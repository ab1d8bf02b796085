"""The shard flow: runs one shard of a job on a worker. Jobs with `shards` start it, and people do not."""

import asyncio
from dataclasses import replace
from typing import Annotated

from prefect.client.schemas.objects import State
from prefect.states import Cancelled
from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..tasks.ledger.ledger import Ledger
from ..tasks.ledger.result_index import ResultCache
from ..tasks.ledger.shard_files import ShardFiles
from .engine.context import open_capacity, open_run_context, resolve_provider_with_volume
from .engine.executor import LaneExecutor
from .engine.outcome_sink import OutcomeSink
from .engine.termination import cancel_at_termination
from .inputs.host_paths import locate_ledger
from .parameters import Options, VolumeName
from .plan import LABELS, execution_label
from .prefect_flow import define_function_flow
from .sharding.heartbeat import HeartbeatWriter, ShardCancelled


@define_function_flow("rlm-shard")
async def shard(
    work: Annotated[str, Field(description="File in the job's ledger that describes this shard's work.")],
    options: Annotated[Options, Field(description="Parameters of the job for this shard.")],
    volume_name: VolumeName = None,
    files_digest: Annotated[
        str | None, Field(None, description="Hash of the host files that the job started with.")
    ] = None,
) -> State[None] | None:
    """Run the executions of one shard, and write their outcomes to the ledger of its job, which collects them.

    The run ends Completed even if executions failed, because the job reports failures. It ends Cancelled if the job
    cancelled it, even before this process started.

    Raises:
        NotRun: The job has started this shard again meanwhile.
        ConfigurationError: The shard cannot run on this worker.
    """
    files = ShardFiles.from_work_path(work)
    files = replace(files, ledger=locate_ledger(files.ledger))
    try:
        with cancel_at_termination():
            heartbeat = HeartbeatWriter(files)
            async with heartbeat.run():
                await _run_executions(files, heartbeat, options, volume_name, files_digest)
    except ShardCancelled as error:
        return Cancelled(message=str(error))
    return None


async def _run_executions(
    files: ShardFiles, heartbeat: HeartbeatWriter, options: Options, volume_name: str | None, files_digest: str | None
) -> None:
    header, executions = files.read_work()
    provider = await resolve_provider_with_volume(options, volume_name)
    if header.commit is not None:
        provider.pin(header.commit)
    if files_digest != await provider.compute_files_digest():
        named = [*(options.python_path or ()), *map(str, (options.mounts or {}).values())]
        raise ConfigurationError(
            f"the files of python_path or mounts differ on this worker ({', '.join(named)}): copy the "
            "same files to every worker, mounts with their modification times"
        )
    await provider.check()
    assert options.results_path is not None
    ledger = Ledger(locate_ledger(options.results_path), files.part_prefix)
    try:
        await asyncio.to_thread(ledger.create)
    except ConfigurationError as error:
        raise OSError(str(error)) from error  # The parent could, so only this worker cannot, or only now.
    label = LABELS.get(header.what, execution_label)
    context = await open_run_context(provider, options, label, ledger, header.total, files.part_prefix)
    heartbeat.context = context
    lines = await asyncio.to_thread(ledger.load_latest_lines, files.part_prefix)
    context.log.info(
        "shard %d of %d: %d execution%s %s; results in %s",
        files.shard + 1,
        header.shards,
        header.total,
        "s" if header.total != 1 else "",
        await provider.describe_sandboxes(),
        ledger.path,
    )
    sink = OutcomeSink(context, heartbeat)
    cache = ResultCache(ledger, lambda key: lines.pop(key, None))
    try:
        async with open_capacity(context) as slots:
            executor = LaneExecutor(context=context, slots=slots, sink=sink)
            await executor.execute_all(executions, cache.find_result)
    except BaseException:
        await context.flush_ledger_after_error()
        raise
    sink.log_unlogged_failures()
    await asyncio.to_thread(ledger.close)
