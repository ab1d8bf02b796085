"""What stands in for other machines: apart from this one but for a few ports, and gone at once when it is killed."""

import json
import os
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...infra.waiting import wait_until
from ...infra.workers import Machine

pytestmark = [
    pytest.mark.requires("linux"),
    pytest.mark.usefixtures("no_process_left"),
]

# Says what it finds, and starts what would outlive it: a process in a session of its own.
PROGRAM = """
import json, os, socket, subprocess, sys, time

def reached(port):
    try:
        with socket.create_connection(("127.0.0.1", int(port)), 100) as asking:
            sent = os.urandom(3_000_000)
            import threading
            threading.Thread(target=lambda: (asking.sendall(sent), asking.shutdown(socket.SHUT_WR))).start()
            got = bytearray()
            while data := asking.recv(65536):
                got += data
            return got == sent
    except OSError:
        return False

subprocess.Popen(["sleep", "600"], start_new_session=True)
if not (child := os.fork()):
    subprocess.Popen(["sleep", "600"])
    os._exit(0)
os.waitpid(child, 0)
asked, other = sys.argv[1:]
print(json.dumps({"asked": reached(asked), "other": reached(other), "name": socket.gethostname()}), flush=True)
time.sleep(600)
"""


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it is sent."""

    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[Callable[[], int]]:
    """Starts servers on loopback that send back what they are sent; their ports."""
    servers: list[socketserver.ThreadingTCPServer] = []

    def start() -> int:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def said(machine: Machine) -> dict[str, Any]:
    """The line of JSON that the program prints."""

    def has_said() -> str:
        text = machine.log.read_text() if machine.log.exists() else ""
        assert machine.status() is None, text
        return text if text.endswith("}\n") else ""

    return json.loads(wait_until(has_said))


def started(tmp_path: Path, *arguments: str, **options: Any) -> Machine:
    return Machine(
        [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
        folder=tmp_path,
        log=tmp_path / "log",
        name="elsewhere",
        environment={"PATH": os.environ["PATH"]},
        **options,
    )


@pytest.mark.parametrize("apart", [True, False])
def test_a_machine_reaches_its_ports_and_leaves_no_process_when_it_is_killed_or_who_started_it(
    tmp_path, echo, apart, processes
):
    asked, other = echo(), echo()
    before = set(processes())
    for ending in ("kill", "relay"):
        (tmp_path / ending).mkdir()
        with started(tmp_path / ending, str(asked), str(other), ports=[asked], apart=apart) as machine:
            if machine.apart:
                assert said(machine) == {"asked": True, "other": False, "name": "elsewhere"}
            else:
                assert said(machine)["asked"]
            assert sum("sleep 600" in command for pid, command in processes().items() if pid not in before) == 2
            if ending == "kill":
                machine.kill()
                assert machine.status() == 137
                assert set(processes()) <= before
            else:
                os.kill(machine.relay, 9)  # the process that holds it, which the tests have started
                wait_until(lambda: set(processes()) <= before)
