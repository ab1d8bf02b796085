"""Where shards run: their deployment, its work pool, and the workers of it that are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ...sandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

DEPLOYMENT = "shard/batch-shard"
PATIENCE = 45.0  # seconds for a worker to come, before the first shard: it tells the server every 30 s that it is there


@dataclass(frozen=True, slots=True)
class Workers:
    """The work pool that shards run in; `places` are the flow runs that it takes beside this one, None without a limit.

    A pool that has no workers, because what stands behind it begins runs by itself, has `waits_for_workers` False. A
    worker that `runs_itself` what it takes has a process for each; others ask something else to, which takes longer:
    `starting` seconds are enough from a worker's taking a shard to its first sign of life.
    """

    deployment_id: UUID
    pool: str
    places: int | None
    waits_for_workers: bool
    runs_itself: bool

    @property
    def starting(self) -> float:
        """Seconds."""
        return 120.0 if self.runs_itself else 900.0  # an image may have to be fetched first

    async def online(self, client: PrefectClient) -> int:
        """How many workers the server has heard of lately."""
        found = await client.read_workers_for_work_pool(self.pool)
        return sum(worker.status == WorkerStatus.ONLINE for worker in found)


async def workers(client: PrefectClient, log: logging.Logger | logging.LoggerAdapter[Any]) -> Workers:
    """Where shards can run beside this flow run, once a worker is there.

    Raises ConfigurationError where the deployment or its work pool is missing, paused or too small, and where no worker
    has come within `PATIENCE` seconds.
    """
    try:
        deployment = await client.read_deployment_by_name(DEPLOYMENT)
    except ObjectNotFound:
        raise ConfigurationError(
            f"the deployment {DEPLOYMENT}, which runs shards, is missing on this Prefect server: `rlm-batch deploy` "
            "makes it"
        ) from None
    if deployment.paused:
        raise ConfigurationError(f"the deployment {DEPLOYMENT}, which runs shards, is paused: resume it")
    limit = deployment.global_concurrency_limit
    if limit is not None and limit.active:
        raise ConfigurationError(
            f"the deployment {DEPLOYMENT} has a concurrency limit, under which shards could wait for one another or be "
            "cancelled: take it away. What is to be limited is the provider's max_sandboxes"
        )
    name = deployment.work_pool_name
    if name is None:
        raise ConfigurationError(
            f"the deployment {DEPLOYMENT} has no work pool: `rlm-batch deploy --reset` gives it one"
        )
    pool = await client.read_work_pool(name)
    if pool.is_paused:
        raise ConfigurationError(f"the work pool {name}, where shards run, is paused: resume it")
    queue = await client.read_work_queue_by_name(deployment.work_queue_name or "default", work_pool_name=name)
    if queue.is_paused:
        raise ConfigurationError(
            f"the work queue {queue.name} of the pool {name}, where shards run, is paused: resume it"
        )
    places = min(
        (limit - taken for limit, taken in _limits(pool, queue) if limit is not None),
        default=None,
    )
    if places is not None and places < 1:
        raise ConfigurationError(
            f"the work pool {name} or its queue {queue.name} takes too few flow runs at one time for a shard beside "
            "the run that waits for it: raise its concurrency limit to 2 or more"
        )
    apart = pool.is_push_pool or pool.is_managed_pool
    found = Workers(deployment.id, name, places, not apart, pool.type == "process")
    await _wait_for_one(client, found, log)
    return found


def _limits(pool: Any, queue: Any) -> list[tuple[int | None, int]]:
    """The limits of a pool and a queue, each with how much of it this flow run takes."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    inside = run is not None and run.work_pool_name == pool.name
    same = inside and run is not None and run.work_queue_name == queue.name
    return [(pool.concurrency_limit, int(inside)), (queue.concurrency_limit, int(same))]


async def _wait_for_one(
    client: PrefectClient, found: Workers, log: logging.Logger | logging.LoggerAdapter[Any]
) -> None:
    if not found.waits_for_workers:
        return
    until = asyncio.get_running_loop().time() + PATIENCE
    told = False
    while not await found.online(client):
        if asyncio.get_running_loop().time() >= until:
            raise ConfigurationError(
                f"the work pool {found.pool} has no worker, so that no shard would ever run: start one with "
                f"`prefect worker start --pool {found.pool}`, or `rlm-batch up`, on each machine that is to take part"
            )
        if not told:
            log.warning("the work pool %s has no worker: waiting %.0f s for one", found.pool, PATIENCE)
            told = True
        await asyncio.sleep(1.0)


def server_url() -> str:
    """The Prefect server that is configured. Raises ConfigurationError where none is, for shards run on its workers."""
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigurationError(
            "shards run on the workers of a Prefect server, and none is configured: start one with `rlm-batch up` and "
            "name it in PREFECT_API_URL, or leave shards out"
        )
    return url


@asynccontextmanager
async def server() -> AsyncIterator[PrefectClient]:
    """The Prefect server. Raises ConfigurationError where none is configured."""
    server_url()
    async with get_client() as client:
        yield client
