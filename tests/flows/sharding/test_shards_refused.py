"""A job whose shards could not run is refused in a sentence before anything runs."""

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, batch
from rlm_batch.deployments.deploy import deploy
from rlm_batch.flows.sharding import work_pool

pytestmark = pytest.mark.anyio

POOL = "of-no-machine"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The server's, with our deployments on a work pool that has no worker."""
    monkeypatch.setattr(work_pool, "WORKER_TIMEOUT_SECONDS", 2.0)
    await deploy(work_pool=POOL, reset=True)
    async with get_client() as found:
        yield found
        deployment = await found.read_deployment_by_name(work_pool.SHARD_DEPLOYMENT)
        await found.delete_deployment(deployment.id)
        await found.delete_work_pool(POOL)
    await deploy(reset=True)  # or the other tests of this server would find the deployments on a pool that is gone


async def refusal(**parameters: Any) -> str:
    parameters = {"shards": 2, **parameters}
    with pytest.raises(ConfigurationError) as caught:
        await batch("SUBMIT(y=x)", inputs=[{"x": 1}, {"x": 2}], **parameters)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.full
async def test_a_pool_without_a_worker(client):
    assert "the work pool of-no-machine has no worker" in await refusal()


@pytest.mark.full
async def test_a_deployment_that_is_missing(client):
    deployment = await client.read_deployment_by_name(work_pool.SHARD_DEPLOYMENT)
    await client.delete_deployment(deployment.id)
    try:
        assert "`rlm-batch deploy` makes it" in await refusal()
    finally:
        await deploy(work_pool=POOL)


@pytest.mark.full
async def test_a_deployment_with_a_limit_under_which_shards_would_wait_for_one_another(client):
    deployment = await client.read_deployment_by_name(work_pool.SHARD_DEPLOYMENT)
    await client.update_deployment(deployment.id, DeploymentUpdate(concurrency_limit=1))
    assert "has a concurrency limit" in await refusal()


@pytest.mark.full
async def test_a_pool_or_a_queue_that_is_paused_or_takes_no_run(client):
    await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=0))
    assert "raise its concurrency limit" in await refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True, concurrency_limit=5))
    assert "is paused: resume it" in await refusal()
    await client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    queue = await client.read_work_queue_by_name("default", work_pool_name=POOL)
    await client.update_work_queue(queue.id, is_paused=True)
    assert "the work queue default of the pool" in await refusal()


async def test_no_server():
    with temporary_settings({PREFECT_API_URL: ""}):
        assert "shards run on the workers of a Prefect server, and none is configured" in await refusal()


@pytest.mark.full
async def test_a_location_that_cannot_be_written(client, monkeypatch, tmp_path):
    monkeypatch.setattr(work_pool, "_wait_for_worker", _nothing)
    (tmp_path / "file").write_text("")
    assert "cannot be made" in await refusal(results_path=str(tmp_path / "file" / "run"))


async def _nothing(*_: Any) -> None: ...


@pytest.mark.parametrize("shards", [0, -1, "many", 1.5])
async def test_a_number_of_shards_that_is_none(shards):
    with pytest.raises(ConfigurationError, match="shards"):
        await batch("SUBMIT(y=1)", inputs=[{}], shards=shards)


def test_the_hooks_of_a_flow_take_what_prefect_hands_over():
    """By name: flow, flow_run and state."""
    for hook in [*batch.on_cancellation_hooks, *batch.on_crashed_hooks]:
        assert list(inspect.signature(hook).parameters) == ["flow", "flow_run", "state"]
