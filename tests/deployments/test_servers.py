"""The servers of compose.yaml as processes: a run, a schedule, a limit, and the death of a server."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from rlm_batch.flows.child_process import build_module_command

from ..infra.logged_process import choose_port
from ..infra.programs import COMMAND, run_program
from ..infra.servers import SERVICES, Servers
from ..infra.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600), pytest.mark.requires("postgres", "redis")]

PASSWORD = ("somebody", "a password of the tests")
AUTH = ":".join(PASSWORD)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start all servers, and create the deployments through the first one."""
    with Servers(tmp_path_factory.mktemp("servers"), auth=AUTH) as running:
        settings = {**os.environ, "PREFECT_API_URL": running.urls[0], "PREFECT_API_AUTH_STRING": AUTH}
        made = run_program([COMMAND, *SERVICES["deploy"]["command"][1:]], env=settings)
        assert made.returncode == 0, made.stdout + made.stderr
        yield running


@pytest.fixture(scope="module")
def worker(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a worker with the command of compose.yaml and a new home; return the path of its log."""
    home = tmp_path_factory.mktemp("worker")
    port = choose_port()
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": servers.url or servers.urls[1],
        "PREFECT_API_AUTH_STRING": AUTH,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "RLM_BATCH_RESULTS": str(home / "results"),
    }
    _, *arguments = SERVICES["worker"]["command"]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            build_module_command("rlm_batch.cli.main", *arguments),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200, "the worker")
        yield home / "log"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(is_so: Callable[[], bool], description: str, seconds: float = 200) -> None:
    """Wait until the condition holds; ask again if a server does not answer."""

    def look() -> bool:
        time.sleep(0.2)  # Leave the servers time for other requests.
        with suppress(httpx.HTTPError):
            return is_so()
        return False

    wait_until(look, description, timeout=seconds)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    token = httpx.get(f"{url}/csrf-token?client=tests", auth=PASSWORD, timeout=60).raise_for_status().json()["token"]
    headers = {"Prefect-Csrf-Client": "tests", "Prefect-Csrf-Token": token}
    return httpx.post(f"{url}{path}", json=body, headers=headers, auth=PASSWORD, timeout=60)


def run_on_server(url: str, work: Callable[[], Awaitable[Any]]) -> Any:
    async def working() -> Any:
        return await work()

    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: AUTH}):
        return asyncio.run(working())


def run(url: str, **parameters: Any) -> str:
    """Start a run of rlm-batch/local and return its id without waiting for it."""
    return str(run_on_server(url, lambda: run_deployment("rlm-batch/local", parameters=parameters, timeout=0)).id)  # type: ignore[arg-type]


def state(url: str, flow_run: str) -> str:
    answer = httpx.get(f"{url}/flow_runs/{flow_run}", auth=PASSWORD, timeout=60).raise_for_status()
    run = answer.json()
    return f"{run['state_type']}: {run['state']['message']}"


def has_ended(url: str, flow_run: str) -> bool:
    return state(url, flow_run).split(":")[0] in ("COMPLETED", "FAILED", "CRASHED")


def of_run(flow_run: str) -> dict[str, Any]:
    return {"flow_runs": {"id": {"any_": [flow_run]}}}


def count_completed(url: str, flow_run: str) -> int:
    done = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return int(post(url, "/task_runs/count", **of_run(flow_run), **done).raise_for_status().json())


def test_every_server_refuses_requests_without_the_password(servers: Servers) -> None:
    for url in (*servers.urls, *([servers.url] if servers.url else [])):
        assert httpx.get(f"{url}/work_pools/rlm-batch", timeout=30).status_code == 401
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200


def test_servers_share_runs_workers_and_history(servers: Servers, worker: Path) -> None:
    first, second = servers.urls
    # The run lasts long enough to publish its progress.
    code = "import time; time.sleep(0.3); print('seen'); SUBMIT(y=x)"
    flow_run = run(first, code=code, inputs=[{"x": x} for x in range(30)], max_workers=4)
    wait(lambda: has_ended(second, flow_run), "the run's end")
    assert state(first, flow_run).startswith("COMPLETED"), worker.read_text()[-3000:]
    wait(lambda: count_completed(first, flow_run) == 30, "thirty task runs")
    assert count_completed(second, flow_run) == 30
    # The services store events in batches, every few seconds.
    names: set[str] = set()

    def recorded() -> bool:
        about = {"any_resource": {"id": [f"prefect.flow-run.{flow_run}"]}}
        names.update(
            event["event"] for event in post(second, "/events/filter", filter=about, limit=50).json()["events"]
        )
        return {"prefect.flow-run.Completed", "prefect.task-run.Completed"} <= names

    wait(recorded, "the events")
    for url in (first, second):
        logs = post(url, "/logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}).json()
        assert any("seen" in line["message"] for line in logs)
        keys = {artifact["type"] for artifact in post(url, "/artifacts/filter", **of_run(flow_run)).json()}
        assert {"markdown", "progress"} <= keys
    assert "ERROR" not in servers.log("services")


@pytest.mark.requires("haproxy")
def test_killing_a_server_loses_neither_run_nor_history(servers: Servers, worker: Path) -> None:
    assert servers.url is not None
    # Enough events a second that the server has some in progress at any moment.
    code = "import time; time.sleep(0.05); SUBMIT(y=x)"
    flow_run = run(servers.url, code=code, inputs=[{"x": x} for x in range(120)], max_workers=6)
    wait(lambda: count_completed(servers.url or "", flow_run) > 20, "twenty task runs")
    servers.kill("server-0")
    try:
        wait(lambda: has_ended(servers.url or "", flow_run), "the run's end", 300)
        assert state(servers.urls[1], flow_run).startswith("COMPLETED"), worker.read_text()[-3000:]
        wait(lambda: count_completed(servers.urls[1], flow_run) == 120, "all task runs")
    finally:
        servers.start("server-0")
    assert count_completed(servers.urls[0], flow_run) == 120
    # Clients send some events twice, as they cannot know which arrived; the server must store each once.
    about = {"related": {"id": [f"prefect.flow-run.{flow_run}"]}, "event": {"name": ["prefect.task-run.Completed"]}}

    def count_ends() -> int:
        return int(post(servers.urls[0], "/events/filter", filter=about, limit=1).json()["total"])

    wait(lambda: count_ends() >= 120, "the events")
    assert count_ends() == 120
