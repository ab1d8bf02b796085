"""The work pool of shards: its deployment, its workers, and the number of shards that they take."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.server_message import describe_server_error
from ...tasks.task_log import Logger

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

SHARD_DEPLOYMENT = "rlm-shard/shards"
SHARD_ENTRYPOINT = "rlm_batch.flows.shard.shard"
WORKER_TIMEOUT_SECONDS = 45.0  # The first worker may take so long: workers report to the server every 30 s.
DEFAULT_EXECUTIONS_PER_SHARD = 10_000  # minutes of work
MAX_ACTIVE_OUTSIDE_WORKERS = 32  # active shards, if the worker does not run them itself


@dataclass(frozen=True, slots=True)
class WorkPool:
    """The work pool in which shards run, and their deployment.

    `free_places` is the number of flow runs that the pool takes in addition to this one; None without a limit.
    `needs_workers` is False if a service starts the runs of the pool without workers. `runs_in_worker` is True if the
    worker runs them as its child processes. Other workers start containers or machines, which takes longer.
    """

    deployment_id: UUID
    name: str
    free_places: int | None
    needs_workers: bool
    runs_in_worker: bool

    @property
    def start_timeout_seconds(self) -> float:
        """The time that a shard may take from its start by a worker to its first heartbeat."""
        return 120.0 if self.runs_in_worker else 900.0  # an image may have to be fetched first

    async def count_online_workers(self, client: PrefectClient) -> int:
        """Return the number of workers that have reported to the server recently."""
        workers = await client.read_workers_for_work_pool(self.name)
        return sum(worker.status == WorkerStatus.ONLINE for worker in workers)


@dataclass(slots=True)
class ShardPlan:
    """The work pool of a job's shards, the number of its online workers, and the number of shards."""

    work_pool: WorkPool
    online_workers: int
    shard_count: int

    @property
    def description(self) -> str:
        """A phrase that says where the job runs."""
        return f"in {self.shard_count} shards on the work pool {self.work_pool.name}"

    def compute_max_active(self) -> int:
        """Return how many shards may be active at one time.

        A worker that runs shards itself gets one shard to run and one that is ready. If shards run outside of the
        workers, such as in containers, the number of workers is no limit. The pool's own limit always holds.
        """
        limit = max(2, 2 * self.online_workers) if self.work_pool.runs_in_worker else MAX_ACTIVE_OUTSIDE_WORKERS
        return min(limit, self.work_pool.free_places or limit)


async def plan_shards(shards: int | Literal["auto"], total: int, log: Logger) -> ShardPlan:
    """Return the plan for `total` executions. Raises ConfigurationError if no shard can run beside this flow run."""
    try:
        async with open_server_client() as client:
            work_pool = await _find_work_pool(client, log)
            online = await work_pool.count_online_workers(client) if work_pool.needs_workers else 1
    except PrefectHTTPStatusError as error:
        raise ConfigurationError(
            f"the Prefect server could not be asked for the work pool of shards: {describe_server_error(error)}"
        ) from error
    return ShardPlan(work_pool, online, compute_shard_count(shards, total, online))


def compute_shard_count(shards: int | Literal["auto"], total: int, online_workers: int) -> int:
    """Return the number of shards: `shards`, or with "auto" enough for the size of the job and for its workers."""
    enough = max(math.ceil(total / DEFAULT_EXECUTIONS_PER_SHARD), online_workers)
    return min(total, enough if shards == "auto" else shards)


async def _find_work_pool(client: PrefectClient, log: Logger) -> WorkPool:
    """Return the work pool where shards can run beside this flow run, once it has a worker.

    Raises ConfigurationError if the deployment or its work pool is missing, paused or too small, or if no worker is
    online within `WORKER_TIMEOUT_SECONDS`.
    """
    try:
        deployment = await client.read_deployment_by_name(SHARD_DEPLOYMENT)
    except ObjectNotFound:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT}, which runs shards, is missing on this Prefect server: "
            "create it with `rlm-batch deploy`"
        ) from None
    if deployment.entrypoint != SHARD_ENTRYPOINT:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT} runs {deployment.entrypoint} instead of shards: delete it, and "
            "`rlm-batch deploy` makes ours"
        )
    if deployment.paused:
        raise ConfigurationError(f"the deployment {SHARD_DEPLOYMENT}, which runs shards, is paused: resume it")
    limit = deployment.global_concurrency_limit
    if limit is not None and limit.active:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT} has a concurrency limit, so shards could wait for each "
            "other: remove it, and set the provider's max_sandboxes instead"
        )
    name = deployment.work_pool_name
    if name is None:
        raise ConfigurationError(
            f"the deployment {SHARD_DEPLOYMENT} has no work pool: delete it, and `rlm-batch deploy` makes it again"
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
            f"the work pool {name} or its queue {queue.name} allows only one flow run at a time: raise "
            "its concurrency limit to 2 or more"
        )
    has_no_workers = pool.is_push_pool or pool.is_managed_pool
    work_pool = WorkPool(deployment.id, name, places, not has_no_workers, pool.type == "process")
    if work_pool.needs_workers:
        await _wait_for_worker(client, work_pool, log)
    return work_pool


def _list_limits(pool: Any, queue: Any) -> list[tuple[int | None, int]]:
    """Return the limits of a pool and a queue, each with the number of places that this flow run takes."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    is_in_pool = run is not None and run.work_pool_name == pool.name
    is_in_queue = is_in_pool and run is not None and run.work_queue_name == queue.name
    return [(pool.concurrency_limit, int(is_in_pool)), (queue.concurrency_limit, int(is_in_queue))]


async def _wait_for_worker(client: PrefectClient, pool: WorkPool, log: Logger) -> None:
    give_up_at = asyncio.get_running_loop().time() + WORKER_TIMEOUT_SECONDS
    has_warned = False
    while not await pool.count_online_workers(client):
        if asyncio.get_running_loop().time() >= give_up_at:
            raise ConfigurationError(
                f"the work pool {pool.name} has no worker: start one on each machine with `prefect worker "
                f"start --pool {pool.name}` or `rlm-batch up`"
            )
        if not has_warned:
            log.warning("the work pool %s has no worker: waiting %.0f s for one", pool.name, WORKER_TIMEOUT_SECONDS)
            has_warned = True
        await asyncio.sleep(1.0)


def require_server_url() -> None:
    """Raise ConfigurationError if no Prefect server is configured: shards run on a server's workers."""
    if not PREFECT_API_URL.value():
        raise ConfigurationError(
            f"{name_parameter('shards')} needs a Prefect server with workers: start one with `rlm-batch "
            f"up` and set PREFECT_API_URL, or leave {name_parameter('shards')} out"
        )


def open_server_client() -> PrefectClient:
    """Return a client of the Prefect server as a context manager. Raises ConfigurationError if none is configured."""
    require_server_url()
    return get_client()
