"""The number of a job's shards, how many run at a time, and errors when no worker can run them."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
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


async def read_refusal(**parameters: Any) -> str:
    parameters = {"shards": 2, **parameters}
    with pytest.raises(ConfigurationError) as caught:
        await batch("SUBMIT(y=x)", inputs=[{"x": 1}, {"x": 2}], **parameters)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.full
async def test_shards_that_cannot_run_are_refused(client, monkeypatch, tmp_path):
    assert "the work pool of-no-machine has no worker" in await read_refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=0))
    assert "raise its concurrency limit" in await read_refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True, concurrency_limit=5))
    assert "is paused: resume it" in await read_refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    queue = await client.read_work_queue_by_name("default", work_pool_name=POOL)
    await client.update_work_queue(queue.id, is_paused=True)
    assert "the work queue default of the pool" in await read_refusal()
    await client.update_work_queue(queue.id, is_paused=False)

    with monkeypatch.context() as with_a_worker:
        with_a_worker.setattr(work_pool, "_wait_for_worker", _nothing)
        (tmp_path / "file").write_text("")
        assert "cannot be created" in await read_refusal(results_path=str(tmp_path / "file" / "run"))

    deployment = await client.read_deployment_by_name(work_pool.SHARD_DEPLOYMENT)
    await client.update_deployment(deployment.id, DeploymentUpdate(concurrency_limit=1))
    assert "has a concurrency limit" in await read_refusal()
    await client.delete_deployment(deployment.id)
    theirs = await client.create_deployment(
        deployment.flow_id, "shards", entrypoint="flows.py:mine", work_pool_name=POOL
    )
    assert "runs flows.py:mine instead of shards: delete it" in await read_refusal()
    await client.delete_deployment(theirs)
    assert "create it with `rlm-batch deploy`" in await read_refusal()


async def _nothing(*_: Any) -> None: ...


async def test_shards_without_a_server_are_refused():
    with temporary_settings({PREFECT_API_URL: ""}):
        assert "shards needs a Prefect server with workers" in await read_refusal()


@pytest.mark.parametrize("shards", [0, "many"])
async def test_an_invalid_number_of_shards_is_refused(shards):
    with pytest.raises(ConfigurationError, match="shards"):
        await batch("SUBMIT(y=1)", inputs=[{}], shards=shards)


def pool(*, free_places: int | None = None, runs_in_worker: bool = True) -> work_pool.WorkPool:
    return work_pool.WorkPool(uuid4(), "pool", free_places, True, runs_in_worker)


@pytest.mark.parametrize(
    ("asked", "total", "online", "shards"),
    [("auto", 25_000, 2, 3), ("auto", 100, 4, 4), ("auto", 3, 4, 3), (8, 100, 2, 8), (8, 5, 2, 5)],
)
def test_a_job_has_the_requested_shards_or_enough_for_all_workers(asked, total, online, shards):
    assert work_pool.compute_shard_count(asked, total, online) == shards
    assert f"in {shards} shards" in work_pool.ShardPlan(pool(), online, shards).description


@pytest.mark.parametrize(
    ("shard_pool", "online", "limit"),
    [(pool(), 1, 2), (pool(), 4, 8), (pool(free_places=3), 4, 3), (pool(runs_in_worker=False), 1, 32)],
)
def test_active_shards_stay_within_worker_and_pool_limits(shard_pool, online, limit):
    assert work_pool.ShardPlan(shard_pool, online, 100).compute_max_active() == limit
