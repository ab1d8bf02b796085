"""The work pool of shards: its deployment, its workers, and the number of shards that they take."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ...sandbox.errors import ConfigurationError
from ...tasks.task_log import Logger

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

SHARD_DEPLOYMENT = "rlm-shard/shards"
WORKER_TIMEOUT_SECONDS = 45.0  # The first worker may take so long: workers report to the server every 30 s.
DEFAULT_EXECUTIONS_PER_SHARD = 10_000  # minutes of work
MAX_ACTIVE_OUTSIDE_WORKERS = 32  # active shards, if the worker does not run them itself


@dataclass(slots=True)
class ShardPlan:
    """The work pool in which a job's shards run, their deployment, and their number."""

    deployment_id: UUID
    pool: str
    free_places: int | None  # flow runs that the pool takes in addition to this one; None without a limit
    needs_workers: bool  # False if a service starts the runs of the pool without workers
    runs_in_worker: bool  # True if the worker's child processes run them; containers and machines start more slowly
    online_workers: int = 1
    shard_count: int = 1

    @property
    def description(self) -> str:
        """A phrase that says where the job runs."""
        return f"in {self.shard_count} shards on the work pool {self.pool}"

    @property
    def start_timeout_seconds(self) -> float:
        """The seconds that a shard may take from its start by a worker to its first heartbeat."""
        return 120.0 if self.runs_in_worker else 900.0  # An image may have to be fetched first.

    async def count_workers(self, client: PrefectClient) -> None:
        """Update the number of workers that have reported to the server recently."""
        if self.needs_workers:
            workers = await client.read_workers_for_work_pool(self.pool)
            self.online_workers = sum(worker.status == WorkerStatus.ONLINE for worker in workers)

    def compute_max_active(self) -> int:
        """Return how many shards may be active at one time: at most as many as the pool has places for.

        A worker that runs shards itself gets one shard to run and one that waits. If shards run outside of the workers,
        such as in containers, the number of workers is no limit.
        """
        limit = max(2, 2 * self.online_workers) if self.runs_in_worker else MAX_ACTIVE_OUTSIDE_WORKERS
        return limit if self.free_places is None else min(limit, self.free_places)


async def plan_shards(shards: int | Literal["auto"], total: int, log: Logger) -> ShardPlan:
    """Return the plan for `total` executions. Raises ConfigurationError if no shard can run beside this flow run."""
    async with open_server_client() as client:
        plan = await _find_work_pool(client)
        await _wait_for_worker(client, plan, log)
    plan.shard_count = compute_shard_count(shards, total, plan.online_workers)
    return plan


def compute_shard_count(shards: int | Literal["auto"], total: int, online_workers: int) -> int:
    """Return the number of shards, at most one for each execution. "auto" depends on the job's size and the workers."""
    if shards == "auto":
        shards = max(math.ceil(total / DEFAULT_EXECUTIONS_PER_SHARD), online_workers)
    return min(total, shards)


async def _find_work_pool(client: PrefectClient) -> ShardPlan:
    """Return the work pool where shards run. Raises ConfigurationError if it is missing or has no place for one."""
    try:
        deployment = await client.read_deployment_by_name(SHARD_DEPLOYMENT)
    except ObjectNotFound:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT}, which runs shards, is missing on this Prefect server: "
            "create it with `rlm-batch deploy`"
        ) from None
    name = deployment.work_pool_name or ""
    pool = await client.read_work_pool(name)
    queue = await client.read_work_queue_by_name(deployment.work_queue_name or "default", work_pool_name=name)
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    # This flow run takes a place itself if it is in the same pool or queue.
    is_in_pool = run is not None and run.work_pool_name == name
    is_in_queue = is_in_pool and run is not None and run.work_queue_name == queue.name
    places: list[int] = []
    if pool.concurrency_limit is not None:
        places.append(pool.concurrency_limit - is_in_pool)
    if queue.concurrency_limit is not None:
        places.append(queue.concurrency_limit - is_in_queue)
    free_places = min(places) if places else None
    if free_places is not None and free_places < 1:
        raise ConfigurationError(
            f"the work pool {name} or its queue {queue.name} allows only one flow run at a time: raise "
            "its concurrency limit to 2 or more"
        )
    needs_workers = not (pool.is_push_pool or pool.is_managed_pool)
    return ShardPlan(deployment.id, name, free_places, needs_workers, runs_in_worker=pool.type == "process")


async def _wait_for_worker(client: PrefectClient, plan: ShardPlan, log: Logger) -> None:
    """Wait until a worker is online. Raises ConfigurationError after `WORKER_TIMEOUT_SECONDS`."""
    give_up_at = asyncio.get_running_loop().time() + WORKER_TIMEOUT_SECONDS
    await plan.count_workers(client)
    if not plan.online_workers:
        log.warning("the work pool %s has no worker: waiting %.0f s for one", plan.pool, WORKER_TIMEOUT_SECONDS)
    while not plan.online_workers:
        if asyncio.get_running_loop().time() >= give_up_at:
            raise ConfigurationError(
                f"the work pool {plan.pool} has no worker: start one on each machine with `prefect worker "
                f"start --pool {plan.pool}` or `rlm-batch up`"
            )
        await asyncio.sleep(1.0)
        await plan.count_workers(client)


def require_server_url() -> None:
    """Raise ConfigurationError if no Prefect server is configured: shards run on a server's workers."""
    if not PREFECT_API_URL.value():
        raise ConfigurationError(
            "`shards` needs a Prefect server with workers: start one with `rlm-batch "
            "up` and set PREFECT_API_URL, or leave `shards` out"
        )


def open_server_client() -> PrefectClient:
    """Return a client of the Prefect server as a context manager. Raises ConfigurationError if none is configured."""
    require_server_url()
    return get_client()
