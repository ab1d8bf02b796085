"""Where shards run: their deployment, its work pool, and the workers of it that are there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ...sandbox.errors import ConfigurationError
from ..engine.context import Log

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

SHARD_DEPLOYMENT = "shard/shards"
# For a worker to come, before the first shard: it tells the server every 30 s that it is there.
WORKER_TIMEOUT_SECONDS = 45.0


@dataclass(frozen=True, slots=True)
class WorkPool:
    """The work pool that shards run in, and the deployment that they are runs of.

    `free_places` are the flow runs that it takes beside this one, None without a limit. A pool that has no workers,
    because what stands behind it begins runs by itself, has `needs_workers` False. A worker that itself runs what it
    takes (`runs_in_worker`) has a process for each; others ask something else to, which takes longer.
    """

    deployment_id: UUID
    name: str
    free_places: int | None
    needs_workers: bool
    runs_in_worker: bool

    @property
    def start_timeout_seconds(self) -> float:
        """Enough from a worker's taking a shard to its first heartbeat."""
        return 120.0 if self.runs_in_worker else 900.0  # an image may have to be fetched first

    async def count_online_workers(self, client: PrefectClient) -> int:
        """How many workers the server has heard of lately."""
        workers = await client.read_workers_for_work_pool(self.name)
        return sum(worker.status == WorkerStatus.ONLINE for worker in workers)


async def find_work_pool(client: PrefectClient, log: Log) -> WorkPool:
    """The work pool where shards can run beside this flow run, once a worker is there.

    Raises ConfigurationError where the deployment or its work pool is missing, paused or too small, and where no worker
    has come within `WORKER_TIMEOUT_SECONDS`.
    """
    try:
        deployment = await client.read_deployment_by_name(SHARD_DEPLOYMENT)
    except ObjectNotFound:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT}, which runs shards, is missing on this Prefect server: `rlm-batch "
            "deploy` makes it"
        ) from None
    if deployment.paused:
        raise ConfigurationError(f"the deployment {SHARD_DEPLOYMENT}, which runs shards, is paused: resume it")
    limit = deployment.global_concurrency_limit
    if limit is not None and limit.active:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT} has a concurrency limit, under which shards could wait for one another "
            "or be cancelled: take it away. What is to be limited is the provider's max_sandboxes"
        )
    name = deployment.work_pool_name
    if name is None:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT} has no work pool: `rlm-batch deploy --reset` gives it one"
        )
    pool = await client.read_work_pool(name)
    if pool.is_paused:
        raise ConfigurationError(f"the work pool {name}, where shards run, is paused: resume it")
    queue = await client.read_work_queue_by_name(deployment.work_queue_name or "default", work_pool_name=name)
    if queue.is_paused:
        raise ConfigurationError(
            f"the work queue {queue.name} of the pool {name}, where shards run, is paused: resume it"
        )
    places = min((limit - taken for limit, taken in _list_limits(pool, queue) if limit is not None), default=None)
    if places is not None and places < 1:
        raise ConfigurationError(
            f"the work pool {name} or its queue {queue.name} takes too few flow runs at one time for a shard beside "
            "the run that waits for it: raise its concurrency limit to 2 or more"
        )
    has_no_workers = pool.is_push_pool or pool.is_managed_pool
    work_pool = WorkPool(deployment.id, name, places, not has_no_workers, pool.type == "process")
    if work_pool.needs_workers:
        await _wait_for_worker(client, work_pool, log)
    return work_pool


def _list_limits(pool: Any, queue: Any) -> list[tuple[int | None, int]]:
    """The limits of a pool and a queue, each with how much of it this flow run takes."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    is_in_pool = run is not None and run.work_pool_name == pool.name
    is_in_queue = is_in_pool and run is not None and run.work_queue_name == queue.name
    return [(pool.concurrency_limit, int(is_in_pool)), (queue.concurrency_limit, int(is_in_queue))]


async def _wait_for_worker(client: PrefectClient, pool: WorkPool, log: Log) -> None:
    give_up_at = asyncio.get_running_loop().time() + WORKER_TIMEOUT_SECONDS
    has_warned = False
    while not await pool.count_online_workers(client):
        if asyncio.get_running_loop().time() >= give_up_at:
            raise ConfigurationError(
                f"the work pool {pool.name} has no worker, so that no shard would ever run: start one with "
                f"`prefect worker start --pool {pool.name}`, or `rlm-batch up`, on each machine that is to take part"
            )
        if not has_warned:
            log.warning("the work pool %s has no worker: waiting %.0f s for one", pool.name, WORKER_TIMEOUT_SECONDS)
            has_warned = True
        await asyncio.sleep(1.0)


def require_server_url() -> None:
    """Raises ConfigurationError where no Prefect server is configured, on whose workers shards run."""
    if not PREFECT_API_URL.value():
        raise ConfigurationError(
            "shards run on the workers of a Prefect server, and none is configured: start one with `rlm-batch up` and "
            "name it in PREFECT_API_URL, or leave shards out"
        )


def open_server_client() -> PrefectClient:
    """A client of the Prefect server, to be entered. Raises ConfigurationError where none is configured."""
    require_server_url()
    return get_client()
