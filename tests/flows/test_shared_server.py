"""The shared server: one for all programs of a user, private, and nothing left of it when nobody uses it."""

import asyncio
import errno
import fcntl
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

import httpx
import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from rlm_batch import ConfigurationError
from rlm_batch.cli.server import show_servers, stop_servers
from rlm_batch.flows.listener import FlowListener
from rlm_batch.flows.prefect_server import _get_shared_server
from rlm_batch.flows.server import shared
from rlm_batch.flows.server.shared import find_shared_server, start_shared_server, wants_shared_server
from rlm_batch.sandbox.process_identity import read_own_identity

from ..infra.prefect_database import make_prefect_home
from ..infra.programs import COMMAND, PATIENCE
from ..infra.waiting import wait_until

WAIT = """
import pathlib, time
pathlib.Path(folder, "begun").touch()
while not pathlib.Path(folder, "go").exists():
    time.sleep(0.05)
SUBMIT(x=1)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with temporary_settings({PREFECT_HOME: tmp_path}):
        yield tmp_path


@pytest.fixture
def state(home: Path) -> Path:
    """Write the state file of a server whose process is this one."""
    path = shared._get_path()
    path.parent.mkdir(mode=0o700)
    write(path)
    return path


def write(path: Path, **changes: Any) -> None:
    content = {"url": "http://127.0.0.1:9/api", "auth": "me:secret", "process": read_own_identity(), "started": 1.0}
    path.write_text(json.dumps(content | changes))


def test_a_server_that_runs_is_found_and_is_then_in_use(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = find_shared_server()
    assert server is not None
    assert (server.auth, server.pid) == ("me:secret", os.getpid())
    with state.open("r+b") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the server does before it ends
    assert show_servers() == 0
    assert ", in use\nUI         http://127.0.0.1:9/login\npassword   me:secret\n" in capsys.readouterr().out
    with pytest.raises(
        ConfigurationError, match=r"a command or a Python program uses the shared Prefect server.*--force"
    ):
        stop_servers(force=False)
    server.close()


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_a_state_file_of_no_running_server_is_ignored(
    state: Path, home: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state.write_text(text)
    assert find_shared_server() is None
    assert (show_servers(), stop_servers(force=False)) == (1, 0)
    assert capsys.readouterr().out == f"no shared Prefect server is running in {home}\n" * 2


def test_a_server_that_ends_is_not_used(state: Path) -> None:
    with state.open("r+b") as server:
        fcntl.flock(server, fcntl.LOCK_EX)
        assert find_shared_server() is None
    write(state, process=read_own_identity() + "1")
    assert find_shared_server() is None


def test_a_silent_server_is_a_one_sentence_error(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write(state, url=f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        with pytest.raises(ConfigurationError, match=f"process {os.getpid()}.* does not answer.*server stop"):
            find_shared_server()


def test_a_directory_that_others_can_use_is_refused(state: Path) -> None:
    state.unlink()
    state.parent.chmod(0o755)
    for use in (find_shared_server, start_shared_server):
        with pytest.raises(ConfigurationError, match=r"does not belong to this user alone.*remove that directory"):
            use()


def test_other_settings_and_versions_have_another_server(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_SERVER_LOGGING_LEVEL

    with temporary_settings({PREFECT_SERVER_LOGGING_LEVEL: "INFO"}):
        assert find_shared_server() is None
    monkeypatch.setenv("RLM_BATCH_SERVER_IDLE", "60")
    assert find_shared_server() is None
    monkeypatch.undo()
    monkeypatch.setattr("prefect.__version__", "3.0.0")
    assert find_shared_server() is None


def test_a_home_that_cannot_be_used_is_a_one_sentence_error() -> None:
    with (
        temporary_settings({PREFECT_HOME: Path("/dev/null/home")}),
        pytest.raises(ConfigurationError, match="PREFECT_HOME is /dev/null/home, where this user cannot create files"),
    ):
        start_shared_server()


@pytest.mark.parametrize(
    ("ci", "chosen", "idle", "is_shared"),
    [
        ("", "", "", True),
        ("true", "", "", False),
        ("true", "shared", "", True),
        ("", "embedded", "", False),
        ("", "", "0", False),
    ],
)
def test_programs_outside_ci_share_a_server_unless_they_are_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, ci: str, chosen: str, idle: str, is_shared: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("RLM_BATCH_SERVER", chosen)
    monkeypatch.setenv("RLM_BATCH_SERVER_IDLE", idle)
    assert wants_shared_server() == is_shared


def test_a_program_whose_home_has_no_locks_has_its_own_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre does

    monkeypatch.setenv("RLM_BATCH_SERVER", "shared")
    monkeypatch.setattr("fcntl.flock", refuse)
    assert asyncio.run(_get_shared_server(FlowListener())) is None


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RLM_BATCH_SERVER", "yes", "RLM_BATCH_SERVER is 'yes': set it to shared or embedded"),
        ("RLM_BATCH_SERVER_IDLE", "soon", "RLM_BATCH_SERVER_IDLE is 'soon': set it to seconds, such as 900"),
        ("RLM_BATCH_SERVER_IDLE", "nan", "RLM_BATCH_SERVER_IDLE is 'nan'"),
    ],
)
def test_a_wrong_setting_is_a_one_sentence_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=told):
        wants_shared_server()


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

    def start(self, *words: str, command: tuple[str, ...] = (COMMAND,), **settings: str) -> subprocess.Popen[str]:
        environment = self.environment | settings
        process = subprocess.Popen([*command, *words], cwd=self.here, env=environment, stdout=-1, stderr=-1, text=True)
        self._started.append(process)
        return process

    def run(self, *words: str, command: tuple[str, ...] = (COMMAND,)) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, command=command)
        output, errors = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def start_waiting(self, **settings: str) -> subprocess.Popen[str]:
        """Start a batch whose execution waits for the file `go`, and return when the execution runs."""
        words = ("batch", "wait.py", "--inputs", "wait.csv", "--provider", "local:none", "--results-path", "results")
        process = self.start(*words, command=(COMMAND,), **settings)
        wait_until(lambda: process.poll() is not None or (self.here / "begun").exists(), timeout=PATIENCE)
        assert process.poll() is None, process.communicate()
        return process

    def list_states(self) -> list[dict[str, Any]]:
        """Return the content of each state file."""
        return [json.loads(path.read_text()) for path in self.home.glob("rlm-batch-servers/*.json")]

    def get_pid(self) -> int:
        (state,) = self.list_states()
        return int(state["process"].split(".")[2])

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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_simultaneous_first_commands_and_later_ones_share_a_private_server(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    for process in [terminal.start("batch", "one.py") for _ in range(3)]:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    pid = terminal.get_pid()
    servers = [command for command in processes().values() if f"{terminal.home}/rlm-batch-servers/" in command]
    assert len(servers) == 1, servers
    (state,) = terminal.list_states()
    assert f"Page: {state['url'].removesuffix('/api')}/runs/flow-run/" in terminal.run("batch", "one.py").stderr
    assert terminal.get_pid() == pid

    folder, password = terminal.home / "rlm-batch-servers", state["auth"].split(":")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.json")] == [0o600]
    assert httpx.get(f"{state['url']}/admin/version", timeout=90).status_code == 401
    assert httpx.get(f"{state['url']}/admin/version", auth=(password[0], password[1]), timeout=90).is_success
    assert password[1] not in Path(f"/proc/{pid}/cmdline").read_text()

    stopped = terminal.run("server", "stop")
    assert stopped.stdout == f"stopped process {pid}\n", stopped
    assert terminal.list_states() == []
    wait_until(lambda: pid not in processes())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_idle_server_ends_and_leaves_nothing_but_not_during_a_run(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    # The execution lasts longer than the idle time: the server has ended its first idle time when `go` appears.
    program = terminal.start_waiting(RLM_BATCH_SERVER_IDLE="0.2")
    pid = terminal.get_pid()
    assert f"process {pid}, " in terminal.run("server").stdout
    assert terminal.run("server", "stop").returncode == 2
    (terminal.here / "go").touch()
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, errors
    wait_until(lambda: pid not in processes(), "the end of the idle server")
    assert terminal.list_states() == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killing_the_server_ends_the_run_with_a_sentence_and_the_next_run_starts_another(terminal: Terminal) -> None:
    program = terminal.start_waiting()
    pid = terminal.get_pid()
    os.kill(pid, signal.SIGKILL)
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 2
    (sentence,) = [line for line in errors.splitlines() if line.startswith("rlm-batch: ")]
    assert "Prefect's shared server has ended by itself while the flow ran" in sentence
    assert f"the results so far are in {terminal.here}/results: run again with this --results-path" in sentence
    assert "Traceback" not in errors
    assert terminal.run("batch", "one.py").returncode == 0
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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_next_run_of_a_program_is_seen_on_the_server_after_a_killed_one(terminal: Terminal) -> None:
    done = terminal.run("-c", AFTER_A_KILL, command=(sys.executable,))
    assert done.returncode == 0, done.stderr
    assert "has ended by itself while the flow ran" in done.stdout
    assert "seen on the new server" in done.stdout


PROGRAM = """
import os, shutil, sys
from rlm_batch import batch
from rlm_batch.flows.server.shared import list_shared_servers

print(batch.sync(["SUBMIT(x=1)"])[0].x, *[server.pid for server in list_shared_servers()])
if sys.argv[1:]:
    shutil.rmtree(os.environ["PREFECT_HOME"])
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_programs_use_the_commands_server_which_ends_with_a_deleted_home(
    terminal: Terminal, processes: Callable[[], dict[int, str]]
) -> None:
    del terminal.environment["RLM_BATCH_SERVER"]
    assert terminal.run("batch", "one.py").returncode == 0
    pid = terminal.get_pid()
    done = terminal.run("-c", PROGRAM, command=(sys.executable,))
    assert done.stdout == f"1 {pid}\n", done.stderr
    assert "(rlm-batch server shows how to sign in)" in done.stderr
    assert "View at" not in done.stderr
    done = terminal.run("-c", PROGRAM, "delete", command=(sys.executable,))
    assert done.stdout == f"1 {pid}\n", done.stderr
    wait_until(lambda: pid not in processes(), "the end of the server")


OWN_SERVERS = """
from prefect import flow
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness
from rlm_batch import batch
from rlm_batch.flows.server.shared import list_shared_servers

@flow
def own():
    return batch.sync(["SUBMIT(x=1)"])[0].x

print(own())
with prefect_test_harness():
    address = PREFECT_API_URL.value()
    print(batch.sync(["SUBMIT(x=2)"])[0].x, PREFECT_API_URL.value() == address)
print(list(list_shared_servers()))
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_program_with_a_flow_or_a_harness_of_its_own_starts_no_shared_server(terminal: Terminal) -> None:
    done = terminal.run("-c", OWN_SERVERS, command=(sys.executable,))
    assert done.stdout == "1\n2 True\n[]\n", done.stderr


@pytest.mark.full
def test_a_full_disk_is_a_sentence(terminal: Terminal) -> None:
    # SQLite fails at a limit of the size of files as on a full disk.
    limited = ("sh", "-c", 'trap "" XFSZ; ulimit -f 8; exec "$@"', "sh", COMMAND)
    terminal.environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Compiled modules would be cut, too.
    done = terminal.run("batch", "one.py", command=limited)
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("rlm-batch: ")]
    assert "server did not start" in sentence, sentence
    assert "Traceback" not in done.stderr
    assert terminal.list_states() == []
