"""A Prefect server that the project starts: it ends with its user, and refuses other web pages."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS, temporary_settings
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from rlm_batch import ConfigurationError, batch
from rlm_batch.deployments.deploy import deploy
from rlm_batch.flows.server.process import ServerProcess

from ..infra.prefect_database import make_prefect_home
from ..infra.programs import run_program
from ..infra.waiting import wait_until


def test_a_used_port_is_a_one_sentence_error(server: str, tmp_path: Path) -> None:
    port = urlsplit(server).port or 0
    with pytest.raises(ConfigurationError) as refused:
        ServerProcess.start(tmp_path, port=port)
    assert f"port {port} is taken: name another with --port" in str(refused.value)
    assert f"PREFECT_API_URL={server}" in str(refused.value)


@pytest.mark.anyio
async def test_writes_that_arrive_at_the_same_time_are_all_answered(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=60) as client:
        flow = (await client.post("/flows/", json={"name": str(uuid4())})).json()["id"]

        async def run() -> list[int]:
            """Create a flow run, start it, add an artifact to it, and return the statuses of the answers."""
            created = await client.post("/flow_runs/", json={"flow_id": flow})
            run_id = created.json().get("id")
            state = {"state": {"type": "RUNNING"}, "force": True}
            started = await client.post(f"/flow_runs/{run_id}/set_state", json=state)
            added = await client.post("/artifacts/", json={"type": "text", "data": "x", "flow_run_id": run_id})
            return [answer.status_code for answer in (created, started, added)]

        assert await asyncio.gather(*(run() for _ in range(15))) == [[201, 201, 201]] * 15


@pytest.mark.anyio
async def test_transactions_that_need_a_second_session_are_answered_at_the_same_time(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=60) as client:
        created = [await client.post("/work_queues/", json={"name": str(uuid4())}) for _ in range(20)]
        queues = [f"/work_queues/{answer.json()['id']}" for answer in created]
        # Prefect reads the queue in a second session before it commits the first one. Its pool has 15 connections.
        paused = await asyncio.gather(*(client.patch(queue, json={"is_paused": True}) for queue in queues))
        assert [answer.status_code for answer in paused] == [204] * 20
        assert (await client.get(queues[-1])).json()["status"] == "PAUSED"


FOREIGN_ORIGINS = [
    "http://evil.example",
    "https://127.0.0.1",
    "http://127.0.0.1:1",
    "http://127.0.0.1.evil.example",
    "null",
]


def test_a_foreign_web_page_can_read_nothing_and_start_no_run(server: str) -> None:
    with SyncPrefectClient(server) as client:
        flow = client.request("POST", "/flows/", json={"name": str(uuid4())}).json()["id"]
    for origin in FOREIGN_ORIGINS:
        page = {"Origin": origin}
        # A browser hides an answer from a page unless the answer names the page.
        answers = [httpx.get(f"{server}/{path}", headers=page, timeout=60) for path in ("flows/count", "admin/version")]
        # A browser sends these requests without a preflight.
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {**page, "Content-Type": kind}
            content = f'{{"flow_id": "{flow}"}}'
            answers.append(httpx.post(f"{server}/flow_runs/", content=content, headers=headers, timeout=60))
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            wish = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "content-type"}
            answers.append(httpx.options(f"{server}/flow_runs/", headers={**page, **wish}, timeout=60))
        found = {(answer.status_code, answer.headers.get("access-control-allow-origin")) for answer in answers}
        assert found == {(403, None)}, origin
    with SyncPrefectClient(server) as client:
        runs = client.request("POST", "/flow_runs/filter", json={"flows": {"id": {"any_": [flow]}}}).json()
    assert runs == []


def test_a_foreign_page_cannot_frame_the_ui(server: str) -> None:
    shown = httpx.get(f"{server.removesuffix('/api')}/", follow_redirects=True, timeout=60)
    assert (shown.status_code, shown.headers["content-security-policy"]) == (200, "frame-ancestors 'self'")


def test_a_foreign_host_name_is_refused(server: str) -> None:
    port = urlsplit(server).port or 0
    names = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"a@localhost:{port}", "")
    for host in (*names, f"prefect-in-memory:{port}"):
        refused = httpx.get(f"{server}/admin/version", headers={"Host": host}, timeout=60)
        assert (refused.status_code, refused.text) == (400, "Invalid host header"), host
    address, connection = f"ws://evil.example:{port}/api/events/out", socket.create_connection(("127.0.0.1", port or 0))
    with pytest.raises(InvalidStatus) as foreign:
        connect(address, sock=connection, open_timeout=100)
    assert foreign.value.response.status_code == 400


def test_web_sockets_of_foreign_pages_are_refused(server: str) -> None:
    address = server.replace("http", "ws", 1)
    for path in ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled"):
        for origin in FOREIGN_ORIGINS:
            with pytest.raises(InvalidStatus) as refused:
                connect(f"{address}/{path}", origin=Origin(origin), open_timeout=100)
            assert refused.value.response.status_code == 403
    own = Origin(server.removesuffix("/api"))
    events = f"{address}/events/out"
    with connect(events, origin=own, open_timeout=100), connect(events, open_timeout=100):
        pass


def test_the_ui_works_under_every_local_name(server: str) -> None:
    port = urlsplit(server).port or 0
    for name in ("127.0.0.1", "localhost", "[::1]"):
        origin = f"http://{name}:{port}"
        wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        allowed = httpx.options(f"{server}/flow_runs/count", headers={**wish, "Origin": origin}, timeout=60)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        own = {"Origin": origin, "Host": f"{name}:{port}"}
        answer = httpx.post(f"{server}/flow_runs/count", json={}, headers=own, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)


def test_automations_of_the_server_reach_its_api(server: str) -> None:
    """Automations call the API in the server's process, as host prefect-in-memory, which no other client may use."""
    event = f"tests.{uuid4()}"
    trigger = {"type": "event", "expect": [event], "posture": "Reactive", "threshold": 1, "within": 0}
    with SyncPrefectClient(server) as client:
        flow = client.request("POST", "/flows/", json={"name": event}).json()["id"]
        wanted = {"name": "x", "flow_id": flow, "parameter_openapi_schema": {"type": "object", "properties": {}}}
        deployment = client.request("POST", "/deployments/", json=wanted).json()["id"]
        action = {"type": "run-deployment", "source": "selected", "deployment_id": deployment}
        wanted = {"name": event, "trigger": trigger, "actions": [action]}
        automation = client.request("POST", "/automations/", json=wanted).json()["id"]

        def send_and_look() -> list[dict[str, Any]]:
            """Send the event again, because the server may not know its new automation yet; return the runs."""
            now = datetime.now(UTC).isoformat()
            resource = {"prefect.resource.id": "tests"}
            happened = {"event": event, "resource": resource, "id": str(uuid4()), "occurred": now}
            client.request("POST", "/events", json=[happened])
            time.sleep(0.5)  # The server makes a run for each event that it recognizes.
            return client.request("POST", "/flow_runs/filter", json={"flows": {"id": {"any_": [flow]}}}).json()

        try:
            runs = wait_until(send_and_look, "a run")
        finally:
            client.request("DELETE", "/automations/{id}", path_params={"id": automation})
            client.request("DELETE", "/deployments/{id}", path_params={"id": deployment})
    assert {run["deployment_id"] for run in runs} == {deployment}


@pytest.mark.full
def test_an_allowed_page_and_its_host_are_answered(tmp_path: Path) -> None:
    make_prefect_home(tmp_path)
    allowed = temporary_settings({PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS: " https://Prefect.example/ "})
    with allowed, ServerProcess.start(tmp_path) as running:
        for origin, status in (("https://prefect.example", 200), ("https://evil.example", 400)):
            page = {"Origin": origin, "Host": urlsplit(origin).netloc}
            answer = httpx.get(f"{running.url}/admin/version", headers=page, timeout=60)
            assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (status, status == 200)
        own = {"Origin": running.url.removesuffix("/api")}
        assert (
            "access-control-allow-origin" in httpx.get(f"{running.url}/admin/version", headers=own, timeout=60).headers
        )


def test_a_missing_or_refusing_api_is_a_one_sentence_error(server: str) -> None:
    port = urlsplit(server).port
    for url, reason in (
        (f"http://127.1:{port}/api", "400 Bad Request: Invalid host header"),
        (f"http://127.0.0.1:{port}", "404 Not Found: Not Found"),
        ("http://no-such-host.invalid/api", ".*[Nn]ame .*"),
        ("http://127.0.0.1:9/api", ".*onnect.*"),  # no server listens here
    ):
        said = rf"the Prefect server at {url} does not answer or refuses \({reason}\): start it; or correct"
        with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ConfigurationError, match=said):
            asyncio.run(deploy())


@pytest.mark.full
def test_a_server_with_a_password_works_for_clients_that_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_prefect_home(tmp_path)
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    auth = "somebody:a password: of the tests"
    with ServerProcess.start(tmp_path, auth=auth) as running:
        assert httpx.get(f"{running.url}/admin/version", timeout=60).status_code == 401
        refused = pytest.raises(ConfigurationError, match=r"401 Unauthorized.* set PREFECT_API_AUTH_STRING")
        with temporary_settings({PREFECT_API_URL: running.url}), refused:
            asyncio.run(batch(["SUBMIT(x=1)"], provider="local:none"))
        # Run it in a new process: this process's events would go to that server for the rest of the tests.
        program = (
            "import asyncio, rlm_batch\n"
            "print(asyncio.run(rlm_batch.batch(['SUBMIT(x=1)'], provider='local:none'))[0].x)"
        )
        environment = os.environ | {"PREFECT_API_URL": running.url, "PREFECT_API_AUTH_STRING": auth}
        done = run_program([sys.executable, "-c", program], env=environment)
        assert done.stdout == "1\n", done.stderr
        assert "a password: of the tests" not in running.log.read_text()
        assert "of the tests" not in Path(f"/proc/{running.process.pid}/cmdline").read_text()


def test_no_other_user_can_take_the_port_while_the_server_starts(tmp_path: Path) -> None:
    starting = ServerProcess.start(tmp_path)
    try:
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", urlsplit(starting.url).port))
    finally:
        starting.stop()


@pytest.mark.full
def test_the_server_ends_when_its_parent_is_killed(no_process_left: None, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom rlm_batch.flows.server.process import ServerProcess\n"
        "with ServerProcess.start(Path(sys.argv[1])) as server:\n"
        "    print(server.url, flush=True)\n    time.sleep(3600)\n"
    )
    home = make_prefect_home(tmp_path / "home")
    host = subprocess.Popen([sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    url = host.stdout.readline().strip()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    host.kill()
    host.wait()
    address = ("127.0.0.1", urlsplit(url).port)

    def is_gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(address) != 0

    wait_until(is_gone, "the end of the server")
