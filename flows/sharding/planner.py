"""Into how many shards a job is cut, and where: the plan that is made before anything runs, and the cut itself."""

import asyncio
import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from prefect.exceptions import PrefectHTTPStatusError

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.shard_files import load_or_create_cut
from ...tasks.server_errors import describe_server_error
from ..engine.context import Log
from .attempt import Shard
from .work_pool import WorkPool, find_work_pool, open_server_client

# Executions in a shard where nobody says how many: minutes of work, and its outcomes fit in a page.
DEFAULT_EXECUTIONS_PER_SHARD = 10_000
MAX_ACTIVE_OUTSIDE_WORKERS = 32  # shards at one time that no worker runs itself


@dataclass(slots=True)
class ShardPlan:
    """The work pool that shards run in, how many of its workers are online, and how many shards there shall be."""

    work_pool: WorkPool
    online_workers: int
    shard_count: int

    @property
    def description(self) -> str:
        """Where the job runs, for its log and for whoever watches."""
        return f"in {self.shard_count} shards on the work pool {self.work_pool.name}"

    def compute_max_active(self) -> int:
        """How many shards may be active at one time, and no more than the pool takes.

        For each worker that runs them itself one that runs and one that is ready. Where others run them, in containers
        for example, workers say nothing of how many there may be.
        """
        limit = max(2, 2 * self.online_workers) if self.work_pool.runs_in_worker else MAX_ACTIVE_OUTSIDE_WORKERS
        return min(limit, self.work_pool.free_places or limit)


@dataclass(frozen=True, slots=True)
class ShardCut:
    """The shards of a job. `job_id` is decided by its executions, `ledger_id` is the ledger's own."""

    job_id: str
    ledger_id: str
    shards: list[Shard]


async def plan_shards(shards: int | Literal["auto"], total: int, log: Log) -> ShardPlan:
    """The plan for so many executions. Raises ConfigurationError where no shard can run beside this flow run."""
    try:
        async with open_server_client() as client:
            work_pool = await find_work_pool(client, log)
            online = await work_pool.count_online_workers(client) if work_pool.needs_workers else 1
    except PrefectHTTPStatusError as error:
        raise ConfigurationError(
            f"the Prefect server does not say where shards can run: {describe_server_error(error)}"
        ) from error
    return ShardPlan(work_pool, online, compute_shard_count(shards, total, online))


def compute_shard_count(shards: int | Literal["auto"], total: int, online_workers: int) -> int:
    """As many as were asked for; with "auto" enough for the size of the job, and for its workers."""
    enough = max(math.ceil(total / DEFAULT_EXECUTIONS_PER_SHARD), online_workers)
    return min(total, enough if shards == "auto" else shards)


async def cut_job(ledger: PathOrLocation, keys_digest: str, numbers: range, shard_count: int) -> ShardCut:
    """Cuts the executions with these numbers, as they were cut before if the ledger has this job already.

    Raises OSError where the ledger cannot be read or written.
    """
    job_id = hashlib.sha256(f"{keys_digest} {numbers.start}".encode()).hexdigest()[:12]
    size = math.ceil(len(numbers) / min(shard_count, len(numbers)))
    ledger_id, size = await asyncio.to_thread(load_or_create_cut, ledger, job_id, size)
    shards = [Shard(number, start, min(start + size, numbers.stop)) for number, start in enumerate(numbers[::size])]
    return ShardCut(job_id, ledger_id, shards)
