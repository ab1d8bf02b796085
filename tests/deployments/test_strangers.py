"""A Prefect server that we share with a stranger, whose flows, tasks, tags and pool have the names of ours."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, get_run_logger, tags, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import batch
from rlm_batch.deployments.deploy import deploy
from rlm_batch.flows.child_process import end_process, start_module
from rlm_batch.flows.server.process import build_environment

from ..infra.logged_process import choose_port
from ..infra.prefect_database import make_prefect_home
from ..infra.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

RUNS = 30
TAGS = ("rlm-batch", "local")


@pytest.fixture
def ordinary_server(tmp_path: Path, no_process_left: None) -> Iterator[str]:
    """Run `prefect server start` as anybody would, and yield its address."""
    home, port = make_prefect_home(tmp_path / "server"), choose_port()
    url = f"http://127.0.0.1:{port}/api"
    command = ("prefect", "server", "start", "--port", str(port))
    process = start_module(*command, log=home / "log", environment=build_environment(home))

    def answers() -> bool:
        assert process.poll() is None, (home / "log").read_text()
        try:
            return httpx.get(f"{url}/health").is_success
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, "the server")
        with temporary_settings({PREFECT_API_URL: url}):
            yield url
            APILogWorker.drain_all()  # otherwise its thread sends to a server that has ended
    finally:
        end_process(process)


@task(name="execute", tags=["sandbox"])
def work(number: int) -> int:
    get_run_logger().info("at work")
    if number % 3 == 0:
        raise ValueError("a stranger's error")
    return number


@flow(name="rlm-batch", flow_run_name="strangers-{number}")
def strangers(number: int) -> int:
    get_run_logger().info("begun")
    return work(number)


async def make_strangers_things() -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name="rlm-batch", type="docker"))
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="tag:sandbox:theirs", limit=1))
        flow_id = await client.create_flow_from_name("rlm-batch")
        await client.create_deployment(
            flow_id, "theirs", entrypoint="flows.py:strangers", tags=[*TAGS], work_pool_name="rlm-batch"
        )


async def read_strangers_things() -> list[Any]:
    async with get_client() as client:
        return [
            (await client.read_work_pool("rlm-batch")).model_dump(exclude={"status", "updated"}),
            (await client.read_global_concurrency_limit_by_name("tag:sandbox:theirs")).model_dump(),
            (await client.read_deployment_by_name("rlm-batch/theirs")).model_dump(exclude={"status", "updated"}),
        ]


async def read_log(number: int) -> tuple[str | None, list[str]]:
    """Return the state of a stranger's run and the lines of its log, without names and numbers."""
    async with get_client() as client:
        only = FlowRunFilter(name=FlowRunFilterName(any_=[f"strangers-{number}"]))
        (run,) = await client.read_flow_runs(flow_run_filter=only)
        logs = await client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
    lines = sorted(re.sub(r"strangers-\d+|[\w-]*\d[\w-]*", "N", log.message.split("\n", 1)[0]) for log in logs)
    has_traceback = any("Traceback" in log.message for log in logs)
    assert has_traceback == (number % 3 == 0)
    return run.state_name, lines


def test_thirty_runs_of_ours_change_nothing_of_a_strangers(
    ordinary_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    asyncio.run(make_strangers_things())
    before = asyncio.run(read_strangers_things())
    with tags(*TAGS):
        alone = [strangers(number, return_state=True).name for number in (-2, -3)]
    asyncio.run(deploy())
    for number in range(RUNS):
        with tags(*TAGS):
            strangers(number, return_state=True)
            assert batch.sync(["SUBMIT(x=1)"], provider="local:none")[0].x == 1
    APILogWorker.drain_all()
    assert asyncio.run(read_strangers_things()) == before
    assert alone == ["Completed", "Failed"]
    completed, failed = (asyncio.run(read_log(number)) for number in (-2, -3))
    assert completed[0] == "Completed"
    assert completed[1].count("Finished in state Completed()") == 2
    assert failed[0] == "Failed"
    for number in range(RUNS):
        assert asyncio.run(read_log(number)) == (completed if number % 3 else failed)
