"""Commands, and scripts that opt out, send nothing to other machines without a configured Prefect server."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ..infra.prefect_database import make_prefect_home
from .network_namespace import make_command

SCRIPT = """
import asyncio

from prefect import get_client
from rlm_batch import DaytonaSandbox, LocalInterpreter, batch

async def read_settings():
    async with get_client() as client:
        return (await client.request("GET", "/admin/settings")).json()

(result,) = asyncio.run(batch(["SUBMIT(x=1)"], provider="local:none"))
with LocalInterpreter(isolation="none") as interpreter:
    interpreter.execute("pass")
print("ran", result.x)
DaytonaSandbox(target="eu").save("mine", overwrite=True)
print("saved", DaytonaSandbox.load("mine").target)
print("the server tells its makers:", asyncio.run(read_settings())["server"]["analytics_enabled"])
"""
COMMAND = """
from rlm_batch.cli.main import main

main(["batch", "one.py", "--provider", "local:none"])
"""
# Variables that turn telemetry off; pytest, CI and the project set them.
OPT_OUTS = ("CI", "DO_NOT_TRACK", "GITHUB_ACTIONS", "PREFECT_API_URL", "PREFECT_SERVER_ANALYTICS_ENABLED")
OUTWARD = """
import socket
socket.socket().connect_ex(("192.0.2.1", 443))
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(("192.0.2.1", 53))
try:
    socket.getaddrinfo("name.example", 443)
except OSError:
    pass
"""
INWARD = "import socket; socket.create_server(('127.0.0.1', 0)); socket.socket().connect_ex(('127.0.0.1', 9))"
pytestmark = [pytest.mark.requires("namespaces"), pytest.mark.usefixtures("no_process_left")]


def run_on_a_terminal(folder: Path, program: str, home: Path, **settings: str) -> tuple[int, str, str]:
    """Return how often the program tried to reach other machines, its output and its errors.

    It runs on a terminal, because there Prefect advertises itself to new users.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OPT_OUTS}
    environment |= {"PREFECT_HOME": str(home), "HOME": str(folder), "RLM_BATCH_RESULTS": str(folder / "results")}
    environment |= {"RLM_BATCH_SERVER": "embedded", **settings}
    environment.pop("PYTEST_CURRENT_TEST", None)
    terminal, end = pty.openpty()
    try:
        command = make_command(folder / "count", sys.executable, "-c", program)
        process = subprocess.run(
            command, cwd=folder, env=environment, stdout=end, stderr=subprocess.PIPE, timeout=250, check=False
        )
        errors = process.stderr.decode()
        assert process.returncode == 0, errors
        os.write(end, b"\n")
        printed = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        os.close(end)
    return int((folder / "count").read_text()), printed, errors


def test_connections_that_leave_the_machine_are_counted(tmp_path: Path) -> None:
    """Prove that the count works; otherwise a count of 0 below would prove nothing."""
    assert run_on_a_terminal(tmp_path, INWARD, tmp_path)[0] == 0
    assert run_on_a_terminal(tmp_path, OUTWARD, tmp_path)[0] == 3


@pytest.mark.full
def test_a_script_that_opts_out_sends_no_telemetry(tmp_path: Path) -> None:
    home = make_prefect_home(tmp_path / "home")
    count, printed, errors = run_on_a_terminal(tmp_path, SCRIPT, home, DO_NOT_TRACK="1")
    assert "saved eu" in printed
    assert "ran 1" in printed
    assert "the server tells its makers: False" in printed
    assert count == 0
    assert "ERROR" not in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_command_sends_no_telemetry(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("SUBMIT(x=1)")
    count, printed, _ = run_on_a_terminal(tmp_path, COMMAND, make_prefect_home(tmp_path / "home"))
    assert "/results/" in printed  # the place of its results
    assert count == 0
