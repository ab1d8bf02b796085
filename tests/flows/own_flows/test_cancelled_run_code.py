"""A user's own flow with `run_code` that is interrupted: no sandbox is left, and no task run stays Running."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.deployments.runner import RunnerDeployment
from prefect.states import Cancelling

from rlm_batch.flows.child_process import build_module_command

from ...infra.consent import move_home
from ...infra.logged_process import run_logged_process
from ...infra.waiting import wait_until, wait_until_async

FLOWS = """
import asyncio, sys
from pathlib import Path
from prefect import flow
from prefect.runtime import flow_run
from rlm_batch import run_code

CODE = "import pathlib, time; pathlib.Path(folder, str(n)).touch(); time.sleep(1000)"

def start(folder):
    Path(folder, "run").write_text(flow_run.id)
    return [{"folder": folder, "n": n} for n in range(3)]

@flow
def in_threads(folder: str):
    futures = run_code.map(CODE, start(folder), provider="local:none", timeout=1000)
    return [future.result() for future in futures]

@flow
async def in_threads_of_async_flow(folder: str):
    futures = run_code.map(CODE, start(folder), provider="local:none", timeout=1000)
    return [future.result() for future in futures]

@flow
async def in_the_loop(folder: str):
    return await asyncio.gather(*(run_code(CODE, v, provider="local:none", timeout=1000) for v in start(folder)))

if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    if asyncio.iscoroutine(result):
        asyncio.run(result)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder where a flow writes its run's id, and each execution a file when it has begun."""
    (tmp_path / "flows.py").write_text(FLOWS)
    (tmp_path / "begun").mkdir()
    return tmp_path / "begun"


async def wait_for_end(folder: Path, state: str) -> None:
    """Wait until the flow run has ended in that state, with its three task runs, and no sandbox is left."""
    run_id = (folder / "run").read_text()
    async with get_client() as client:

        async def has_ended() -> bool:
            run = await client.read_flow_run(uuid.UUID(run_id))
            only = FlowRunFilter.model_validate({"id": {"any_": [run_id]}})
            states = [task_run.state_name for task_run in await client.read_task_runs(flow_run_filter=only)]
            return (run.state_name, states) == (state, ["Crashed"] * 3)

        await wait_until_async(has_ended, f"{state}, with three crashed task runs")
    assert not list(Path(tempfile.gettempdir()).glob("rlm-batch-*"))


@pytest.mark.parametrize(
    ("flow", "number"),
    [
        ("in_threads", signal.SIGINT),
        pytest.param("in_threads", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("in_threads_of_async_flow", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("in_the_loop", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("in_the_loop", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_script_ends_its_executions(folder: Path, flow: str, number: int) -> None:
    command = [sys.executable, str(folder.parent / "flows.py"), flow, str(folder)]
    process = subprocess.Popen(command, cwd=folder.parent, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 4, "three executions")
        process.send_signal(number)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    asyncio.run(wait_for_end(folder, "Crashed"))


@pytest.fixture
def pool(server: str, tmp_path: Path) -> Iterator[str]:
    """Start an ordinary Prefect worker of a new pool, and return the pool's name."""
    name = f"pool-{uuid.uuid4().hex[:8]}"
    command = build_module_command("prefect", "worker", "start", "--pool", name, "--type", "process")
    consent = move_home(tmp_path / "user", allow_no_isolation=True)
    environment = os.environ | {"PREFECT_WORKER_QUERY_SECONDS": "1"} | consent
    with run_logged_process(command, tmp_path / "worker.log", cwd=tmp_path, env=environment):
        yield name


@pytest.mark.anyio
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flow", ["in_threads", "in_threads_of_async_flow", "in_the_loop"])
@pytest.mark.parametrize("how", ["cancel", "SIGTERM"])
async def test_a_cancelled_or_terminated_deployment_run_ends_its_executions(
    pool: str,
    folder: Path,
    flow: str,
    how: str,
    processes: Callable[[], dict[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)  # Each flow run gets a copy of the directory that it was deployed from.
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        deployment = RunnerDeployment.from_entrypoint(
            f"{folder.parent / 'flows.py'}:{flow}", name=pool, work_pool_name=pool
        )
        made: Any = deployment.apply()
        id_ = await made if asyncio.iscoroutine(made) else made
        run = await client.create_flow_run_from_deployment(id_, parameters={"folder": str(folder)})
        await wait_until_async(lambda: len(list(folder.iterdir())) == 4, "three executions")
        if how == "cancel":
            await client.set_flow_run_state(run.id, Cancelling())
        else:
            (engine,) = [pid for pid, command in processes().items() if "prefect.engine" in command]
            os.killpg(engine, signal.SIGTERM)
    await wait_for_end(folder, "Cancelled" if how == "cancel" else "Crashed")
