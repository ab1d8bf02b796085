"""Commands send nothing to other machines without a configured Prefect server.

They run in a network namespace with only loopback. The kernel has no route to other addresses there, and counts each
attempt, whatever language the program is written in.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ..infra.prefect_database import make_prefect_home

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
START_LOOPBACK = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 1))"
APART = 'python=$1; "$python" -c "$2"; shift 2; "$python" "$@"; status=$?; cat /proc/self/net/snmp >"$0"; exit $status'
INWARD = "import socket; socket.create_server(('127.0.0.1', 0)); socket.socket().connect_ex(('127.0.0.1', 9))"
pytestmark = [pytest.mark.requires("namespaces"), pytest.mark.usefixtures("no_process_left")]


def run_on_a_terminal(folder: Path, program: str, home: Path) -> tuple[int, str]:
    """Return how often the program tried to reach other machines, and its output.

    It runs on a terminal, because there Prefect advertises itself to new users.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OPT_OUTS}
    environment |= {"PREFECT_HOME": str(home), "HOME": str(folder), "RLM_BATCH_RESULTS": str(folder / "results")}
    environment["RLM_BATCH_SERVER"] = "embedded"
    environment.pop("PYTEST_CURRENT_TEST", None)
    terminal, end = pty.openpty()
    try:
        words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", APART]
        command = [*words, folder / "count", sys.executable, START_LOOPBACK, "-c", program]
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
    names, values = (line.split() for line in (folder / "count").read_text().splitlines()[:2])
    return int(values[names.index("OutNoRoutes")]), printed


def test_connections_that_leave_the_machine_are_counted(tmp_path: Path) -> None:
    """Prove that the count works; otherwise a count of 0 below would prove nothing."""
    assert run_on_a_terminal(tmp_path, INWARD, tmp_path)[0] == 0
    assert run_on_a_terminal(tmp_path, OUTWARD, tmp_path)[0] >= 2


@pytest.mark.full
def test_a_command_sends_no_telemetry(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("SUBMIT(x=1)")
    count, printed = run_on_a_terminal(tmp_path, COMMAND, make_prefect_home(tmp_path / "home"))
    assert "/results/" in printed  # the place of its results
    assert count == 0
