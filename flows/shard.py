"""The shard flow: one shard of a job, on whatever worker takes it. People do not run it; jobs with `shards` do."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..tasks.ledger.shard_files import ShardFiles
from .decorator import batch_flow
from .engine.context import resolve_provider_with_volume
from .parameters import Options, VolumeName
from .sharding.heartbeat import HeartbeatTask
from .sharding.shard_job import open_shard_job


@batch_flow("shard")
async def shard(
    work: Annotated[str, Field(description="The file that says what is to be done, in the ledger of the job")],
    options: Annotated[Options, Field(description="The job's parameters, as they are for this shard")],
    volume_name: VolumeName = None,
) -> None:
    """Runs the executions of one shard, and writes their outcomes to the ledger of its job, which gathers them.

    It ends Completed whatever became of the executions: their failures are the job's to tell. Raises NotRun where the
    job has begun this shard anew meanwhile, and ConfigurationError where it cannot be run on this worker.
    """
    files = ShardFiles.from_work_path(work)
    async with HeartbeatTask(files) as heartbeat:
        header, executions = files.read_work()
        provider = await resolve_provider_with_volume(options.provider, volume_name)
        if header.commit is not None:
            provider.pin(header.commit)
        async with open_shard_job(provider, header, options) as job:
            heartbeat.job = job
            await job.executor.execute_all(executions, find_result=job.cache.find_result)
