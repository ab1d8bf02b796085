"""What stands in for other machines: apart from this one but for a few ports, and gone at once when it is killed."""

import json
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...infra.workers import Fleet, Machine

pytestmark = [
    pytest.mark.requires("linux"),
    pytest.mark.usefixtures("no_process_left"),
]

# Says what it finds, and starts what would outlive it: a process in a session of its own.
PROGRAM = """
import json, os, socket, subprocess, sys, time

def reached(port):
    try:
        with socket.create_connection(("127.0.0.1", int(port)), 5) as asking:
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
    until = time.monotonic() + 60
    while time.monotonic() < until:
        text = machine.log.read_text() if machine.log.exists() else ""
        if text.endswith("}\n"):
            return json.loads(text)
        assert machine.status() is None, text
        time.sleep(0.02)
    raise TimeoutError(machine.log)


def started(tmp_path: Path, *arguments: str, **options: Any) -> Machine:
    return Machine(
        [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
        folder=tmp_path,
        log=tmp_path / "log",
        name="elsewhere",
        environment={"PATH": os.environ["PATH"]},
        **options,
    )


def test_a_machine_of_its_own_reaches_the_ports_it_was_given_and_no_other(tmp_path, echo):
    asked, other = echo(), echo()
    with started(tmp_path, str(asked), str(other), ports=[asked]) as machine:
        if not machine.apart:
            pytest.skip(f"no namespaces here: {machine.refused}")
        assert said(machine) == {"asked": True, "other": False, "name": "elsewhere"}


@pytest.mark.parametrize("apart", [True, False])
def test_a_machine_that_is_killed_leaves_no_process_though_some_had_left_their_parents(
    tmp_path, echo, apart, processes
):
    port, before = echo(), set(processes())
    with started(tmp_path, str(port), str(port), ports=[port], apart=apart) as machine:
        assert said(machine)["asked"]
        assert sum("sleep 600" in command for pid, command in processes().items() if pid not in before) == 2
        machine.kill()
        assert machine.status() == 137
        assert set(processes()) <= before


@pytest.mark.parametrize("apart", [True, False])
def test_a_machine_ends_with_the_process_that_started_it(tmp_path, echo, apart, processes):
    port, before = echo(), set(processes())
    with started(tmp_path, str(port), str(port), ports=[port], apart=apart) as machine:
        said(machine)
        os.kill(machine.relay, 9)  # what holds it, and was started by the tests
        until = time.monotonic() + 30
        while set(processes()) - before and time.monotonic() < until:
            time.sleep(0.02)
        assert set(processes()) <= before


@pytest.mark.full
@pytest.mark.timeout(600)
def test_workers_on_machines_of_their_own_run_what_a_deployment_is_asked_for(tmp_path, running_daytona):
    with Fleet() as fleet:
        running_daytona.reset()
        port = int(running_daytona.url.rsplit(":", 1)[1].split("/")[0])
        environment = {**running_daytona.environment, "RLM_BATCH_ALLOWED_PATHS": str(tmp_path)}
        for worker in fleet.workers(2, ports=[port], environment=environment):
            assert (worker.folder / "home").is_dir()
        code = "import socket; SUBMIT(y=x + 1)"
        runs = {
            provider: fleet.submit(
                "batch/local",
                code=code,
                inputs=[{"x": x} for x in range(4)],
                provider=provider,
                results_path=str(tmp_path / provider),
            )
            for provider in ("local", "daytona")
        }
        for provider, run in runs.items():
            assert fleet.ended(run)["type"] == "COMPLETED"
            lines = [json.loads(line) for part in (tmp_path / provider).glob("part-*") for line in part.open()]
            assert sorted(line["outputs"]["y"] for line in lines) == [1, 2, 3, 4]
            assert {line["meta"]["provider"] for line in lines} == {provider}
