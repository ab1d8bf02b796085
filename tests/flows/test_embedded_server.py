"""The embedded server, which a flow run starts if none is configured: it serves this run and no web page."""

import os
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from ..infra.prefect_database import make_prefect_home
from ..infra.waiting import wait_until

# A program that prints the server's address during an execution, and the result after it reads a line.
PROGRAM = """
import asyncio, sys
from rlm_batch import batch

async def wait_for_line():
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
    print(PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)

print(asyncio.run(batch(["wait_for_line(); SUBMIT(seen=True)"], tools={"wait_for_line": wait_for_line}))[0].seen)
"""


# tests/deployments/test_server.py tests this in detail, on the server of `rlm-batch up`.
@pytest.mark.full
def test_the_embedded_server_accepts_only_allowed_web_pages(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_HOME": str(make_prefect_home(tmp_path / "home")),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "https://allowed.example",
    }
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            address, auth = program.stdout.readline().split()
            name, password = auth.split(":")
            assert httpx.get(f"{address}/admin/version", timeout=90).status_code == 401
            with httpx.Client(base_url=address, auth=(name, password), timeout=90) as client:
                for origin in ("http://evil.example", "null"):
                    assert client.post("/flows/", json={"name": "x"}, headers={"Origin": origin}).status_code == 403
                assert client.get("/admin/version", headers={"Host": "evil.example"}).status_code == 400
                assert [flow["name"] for flow in client.post("/flows/filter", json={}).json()] == ["rlm-batch"]
                allowed = client.get("/admin/version", headers={"Origin": "https://allowed.example"})
                assert allowed.headers["access-control-allow-origin"] == "https://allowed.example"
            sockets = address.replace("http", "ws", 1) + "/events/out"
            options: dict[str, Any] = {
                "additional_headers": {"Authorization": f"Basic {b64encode(auth.encode()).decode()}"},
                "subprotocols": ["prefect"],
            }
            with pytest.raises(InvalidStatus), connect(sockets, origin=Origin("http://evil.example"), **options):
                pass
            with connect(sockets, **options):
                pass
            assert program.communicate("go\n", timeout=90)[0].strip() == "True"
        finally:
            program.kill()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_simultaneous_first_runs_survive_a_killed_database_creation(tmp_path: Path, no_process_left: None) -> None:
    home = tmp_path / "home"
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"PREFECT_HOME": str(home), "RLM_BATCH_RESULTS": str(tmp_path / "results")}
    command = [sys.executable, "-c", "from rlm_batch import batch; print(batch.sync(['SUBMIT(x=1)'])[0].x)"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_being_created() -> bool:
        return (home / "prefect.db").exists() and (home / "prefect.db").stat().st_size > 0

    first = start()
    wait_until(is_being_created)
    others = [start() for _ in range(3)]
    first.kill()
    first.communicate()
    for other in others:
        output, errors = other.communicate(timeout=600)
        assert output.strip() == "1", errors
