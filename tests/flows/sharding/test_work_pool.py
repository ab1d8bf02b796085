"""The number of a job's shards, how many run at a time, and errors when no worker can run them."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, batch
from rlm_batch.deployments.deploy import deploy
from rlm_batch.flows.sharding import work_pool

pytestmark = pytest.mark.anyio

POOL = "of-no-machine"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Return the server's client, with deployments on a work pool that has no worker."""
    monkeypatch.setattr(work_pool, "WORKER_TIMEOUT_SECONDS", 0.0)
    await deploy()
    async with get_client() as prefect_client:
        await _delete_shard_deployment(prefect_client)
        await deploy(work_pool=POOL)
        yield prefect_client
        await _delete_shard_deployment(prefect_client)
        await prefect_client.delete_work_pool(POOL)
    await deploy()


async def _delete_shard_deployment(client: PrefectClient) -> None:
    with suppress(ObjectNotFound):
        await client.delete_deployment((await client.read_deployment_by_name(work_pool.SHARD_DEPLOYMENT)).id)


async def read_refusal() -> str:
    with pytest.raises(ConfigurationError) as caught:
        await batch("SUBMIT(y=x)", inputs=[{"x": 1}, {"x": 2}], shards=2)
    return str(caught.value)


@pytest.mark.full
async def test_shards_that_cannot_run_are_refused(client):
    assert "the work pool of-no-machine has no worker" in await read_refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=0))
    assert "raise its concurrency limit" in await read_refusal()
    await _delete_shard_deployment(client)
    assert "create it with `rlm-batch deploy`" in await read_refusal()


async def test_shards_without_a_server_are_refused():
    with temporary_settings({PREFECT_API_URL: ""}):
        assert "`shards` needs a Prefect server with workers" in await read_refusal()


@pytest.mark.parametrize(
    ("asked", "total", "online", "shards"),
    [("auto", 25_000, 2, 3), ("auto", 100, 4, 4), ("auto", 3, 4, 3), (8, 100, 2, 8), (8, 5, 2, 5)],
)
def test_a_job_has_the_requested_shards_or_enough_for_all_workers(asked, total, online, shards):
    assert work_pool.compute_shard_count(asked, total, online) == shards


@pytest.mark.parametrize(
    ("free_places", "runs_in_worker", "online", "limit"),
    [(None, True, 1, 2), (None, True, 4, 8), (3, True, 4, 3), (None, False, 1, 32)],
)
def test_active_shards_stay_within_worker_and_pool_limits(free_places, runs_in_worker, online, limit):
    plan = work_pool.ShardPlan(uuid4(), "pool", free_places, True, runs_in_worker, online, 100)
    assert plan.compute_max_active() == limit
