"""The shared server with real commands: one for all, private, and nothing left of it when nobody uses it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from ..infra.prefect_database import make_prefect_home
from ..infra.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
COMMAND = (str(Path(sys.executable).with_name("rlm-batch")),)
PATIENCE = 250.0  # seconds; a program that takes longer to import Prefect and start its server has hung
WAIT = """
import pathlib, time
pathlib.Path(folder, "begun").touch()
while not pathlib.Path(folder, "go").exists():
    time.sleep(0.05)
SUBMIT(x=1)
"""


class Terminal:
    """A user's terminal: commands in `tmp_path` with their own PREFECT_HOME."""

    def __init__(self, tmp_path: Path, home: Path) -> None:
        self.home = home
        self.here = tmp_path
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {
            name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "CI")
        } | {"PREFECT_HOME": str(home), "RLM_BATCH_SERVER": "shared", "TMPDIR": str(tmp_path)}
        (tmp_path / "one.py").write_text("SUBMIT(x=1)")
        (tmp_path / "wait.py").write_text(WAIT)
        (tmp_path / "wait.csv").write_text(f"folder\n{tmp_path}\n")

    def start(self, *words: str, command: tuple[str, ...] = COMMAND, **settings: str) -> subprocess.Popen[str]:
        self._started.append(
            subprocess.Popen(
                [*command, *words],
                cwd=self.here,
                env=self.environment | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self._started[-1]

    def run(self, *words: str, command: tuple[str, ...] = COMMAND, **settings: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, command=command, **settings)
        output, errors = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def run_one(self, command: tuple[str, ...] = COMMAND, **settings: str) -> str:
        """Run a batch of one execution, and return what it printed on standard error."""
        done = self.run("batch", "one.py", command=command, **settings)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def start_waiting(self, **settings: str) -> subprocess.Popen[str]:
        """Start a batch whose execution waits for the file `go`, and return when the execution runs."""
        words = ("batch", "wait.py", "--inputs", "wait.csv", "--provider", "local:none", "--results-path", "results")
        process = self.start(*words, command=COMMAND, **settings)
        wait_until(lambda: process.poll() is not None or (self.here / "begun").exists(), timeout=PATIENCE)
        assert process.poll() is None, process.communicate()
        return process

    def list_states(self) -> list[dict[str, Any]]:
        """Return the content of each state file."""
        return [json.loads(path.read_text()) for path in self.home.glob("rlm-batch-servers/*.json")]

    def get_state(self) -> dict[str, Any]:
        (state,) = self.list_states()
        return state

    def get_pid(self) -> int:
        return int(self.get_state()["process"].split(".")[2])

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        self.run("server", "stop", "--force")


@pytest.fixture
def terminal(tmp_path: Path, no_process_left: None) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, make_prefect_home(tmp_path / "home"))
    yield terminal
    terminal.end()


def test_simultaneous_first_commands_and_later_ones_share_a_private_server(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    first = [terminal.start("batch", "one.py") for _ in range(3)]
    for process in first:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    pid = terminal.get_pid()
    servers = [command for command in processes().values() if f"{terminal.home}/rlm-batch-servers/" in command]
    assert len(servers) == 1, servers
    state = terminal.get_state()
    assert f"Page: {state['url'].removesuffix('/api')}/runs/flow-run/" in terminal.run_one()
    assert terminal.get_pid() == pid

    # Other users, and web pages, get nothing.
    folder = terminal.home / "rlm-batch-servers"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.json")] == [0o600]
    own, password = state["url"], tuple(state["auth"].split(":"))
    with httpx.Client(base_url=own, timeout=90) as client:
        assert client.get("/admin/version").status_code == 401
        assert client.get("/admin/settings", auth=("rlm-batch", "guess")).status_code == 401
        assert client.get("/admin/version", auth=password).status_code == 200
        assert client.get("/admin/version", auth=password, headers={"Host": "evil.example"}).status_code == 400
        page = {"Origin": "http://evil.example"}
        assert client.post("/flows/", json={"name": "x"}, auth=password, headers=page).status_code == 403
        ui = client.get(f"{own.removesuffix('/api')}/login", headers={"Accept": "text/html"})
        assert "frame-ancestors 'self'" in ui.headers["content-security-policy"]
    sockets = own.replace("http", "ws") + "/events/out"
    with pytest.raises(InvalidStatus), connect(sockets, origin=Origin("http://evil.example")):
        pass
    assert password[1] not in Path(f"/proc/{pid}/cmdline").read_text()

    stopped = terminal.run("server", "stop")
    assert stopped.stdout == f"stopped process {pid}\n", stopped
    assert terminal.list_states() == []
    wait_until(lambda: pid not in processes())


def test_an_idle_server_ends_and_leaves_nothing_but_not_during_a_run(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    # The execution lasts longer than the idle time: the server has ended its first idle time when `go` appears.
    program = terminal.start_waiting(RLM_BATCH_SERVER_IDLE="0.2")
    pid, port = terminal.get_pid(), urlsplit(terminal.get_state()["url"]).port
    shown = terminal.run("server").stdout
    assert f"process {pid}, " in shown
    assert " in use\n" in shown
    refused = terminal.run("server", "stop")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"rlm-batch: a command uses the shared Prefect server (process {pid})")
    (terminal.here / "go").touch()
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, errors
    wait_until(lambda: pid not in processes(), "the end of the idle server")
    assert terminal.list_states() == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_killing_the_server_ends_the_run_with_a_sentence_and_the_next_run_starts_another(terminal: Terminal) -> None:
    program = terminal.start_waiting()
    pid = terminal.get_pid()
    os.kill(pid, signal.SIGKILL)
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 2
    (sentence,) = [line for line in errors.splitlines() if line.startswith("rlm-batch: ")]
    assert "Prefect's shared server has ended by itself while the flow ran" in sentence
    assert f"the results so far are in {terminal.here}/results: run again with the same results_path" in sentence
    assert "Traceback" not in errors
    terminal.run_one()
    assert terminal.get_pid() != pid


AFTER_A_KILL = """
import asyncio, os, signal, sys
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run
from rlm_batch import ConfigurationError, batch
from rlm_batch.flows.server.shared import find_shared_server

ids = []

async def kill():
    ids.append(flow_run.get_id())
    os.kill(find_shared_server().pid, signal.SIGKILL)
    await asyncio.sleep(1000)

async def look():
    ids.append(flow_run.get_id())
    only = FlowRunFilter(id=FlowRunFilterId(any_=[ids[-1]]))
    async with get_client() as client:
        while not any(run.state_name == "Running" for run in await client.read_task_runs(flow_run_filter=only)):
            await asyncio.sleep(0.1)

async def main():
    try:
        await batch(["kill()"] * 20, tools={"kill": kill}, max_workers=20)
    except ConfigurationError as error:
        print(error)
    await batch(["look(); SUBMIT()"], tools={"look": look})

asyncio.run(main())
print("seen on the new server", flush=True)
"""


def test_the_next_run_of_a_program_is_seen_on_the_server_after_a_killed_one(terminal: Terminal) -> None:
    done = terminal.run("-c", AFTER_A_KILL, command=(sys.executable,))
    assert done.returncode == 0, done.stderr
    assert "has ended by itself while the flow ran" in done.stdout
    assert "seen on the new server" in done.stdout


def test_other_settings_start_another_server_beside_the_first(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    terminal.run_one()
    first = terminal.get_pid()
    terminal.run_one(PREFECT_SERVER_LOGGING_LEVEL="INFO")
    assert len(terminal.list_states()) == 2
    assert terminal.run("server", "stop").stdout.count("stopped process ") == 2
    assert first not in processes()


def test_a_full_disk_is_a_sentence(terminal: Terminal) -> None:
    # SQLite fails at a limit of the size of files as on a full disk.
    limited = ("sh", "-c", 'trap "" XFSZ; ulimit -f 8; exec "$@"', "sh", *COMMAND)
    process = terminal.start("batch", "one.py", command=limited)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    (sentence,) = [line for line in errors.splitlines() if line.startswith("rlm-batch: ")]
    assert "server did not start" in sentence, sentence
    assert "Traceback" not in errors
    assert terminal.list_states() == []
