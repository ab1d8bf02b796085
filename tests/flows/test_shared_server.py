"""The shared server's state file: what is found there is checked, and whatever is wrong with it, a run goes on.

`test_shared_server_process.py` has real servers. Here a small HTTP server answers as a Prefect server does.
"""

import base64
import fcntl
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from rlm_batch import ConfigurationError
from rlm_batch.cli.server import show_servers, stop_servers
from rlm_batch.flows.prefect_server import provide_server
from rlm_batch.flows.server import shared
from rlm_batch.flows.server.shared import SharedServerUnusable, find_shared_server, wants_shared_server
from rlm_batch.sandbox.caller import use_options
from rlm_batch.sandbox.process_identity import read_own_identity

AUTH = "rlm-batch:the password"


class Answers(BaseHTTPRequestHandler):
    """A server's answer to a request for its version, with the password or without."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.requests.append((self.path, self.headers.get("Authorization", "")))
        expected = "Basic " + base64.b64encode(AUTH.encode()).decode()
        self.send_response(200 if self.headers.get("Authorization") == expected else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/api"


@pytest.fixture
def running() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with temporary_settings({PREFECT_HOME: tmp_path}):
        yield tmp_path


@pytest.fixture
def state(home: Path, running: Server) -> Path:
    """Write the state file of a server whose process is this one."""
    path = shared._get_path()
    path.parent.mkdir(mode=0o700)
    write(path, url=running.url)
    return path


def write(path: Path, **changes: Any) -> None:
    content = {"url": "", "auth": AUTH, "process": read_own_identity(), "started": 1.0, **changes}
    path.write_text(json.dumps(content))
    path.chmod(0o600)


def test_a_server_that_answers_with_the_password_is_found_and_is_then_in_use(state: Path, running: Server) -> None:
    server = find_shared_server()
    assert server is not None
    assert (server.url, server.auth, server.pid) == (running.url, AUTH, os.getpid())
    with state.open("r+b") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the server does before it ends
    server.close()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"process": read_own_identity() + "1"}, id="the process has ended"),
        pytest.param({"process": f"{'0' * 32}.1.1.1"}, id="the process ran before a reboot"),
        pytest.param({"auth": "rlm-batch:another"}, id="another server has the port"),
        pytest.param({"url": "http://evil.example/api"}, id="the address is elsewhere"),
        pytest.param({"started": "never"}, id="a field has another type"),
    ],
)
def test_a_state_file_of_no_running_server_is_ignored(state: Path, running: Server, changes: dict[str, Any]) -> None:
    write(state, **{"url": running.url, **changes})
    assert find_shared_server() is None


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"url": 1', b"\xff" * 100])
def test_a_damaged_state_file_is_ignored(state: Path, text: bytes) -> None:
    state.write_bytes(text)
    assert find_shared_server() is None


def test_a_closed_port_is_ignored(state: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # no listen()
        write(state, url=f"http://127.0.0.1:{holder.getsockname()[1]}/api")
        assert find_shared_server() is None


def test_a_state_file_that_others_can_read_is_ignored_and_its_password_is_sent_nowhere(
    state: Path, running: Server
) -> None:
    state.chmod(0o644)
    assert find_shared_server() is None
    assert running.requests == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_state_file_of_another_user_is_ignored(state: Path, running: Server) -> None:
    os.chown(state, 65534, 65534)
    assert find_shared_server() is None
    assert running.requests == []


def test_a_link_in_place_of_the_state_file_is_ignored(state: Path, tmp_path: Path) -> None:
    state.rename(tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    assert find_shared_server() is None


def test_a_directory_that_others_can_use_makes_the_run_embedded_until_it_is_removed(state: Path) -> None:
    folder = state.parent
    folder.chmod(0o755)
    with pytest.raises(SharedServerUnusable, match=r"does not belong to this user alone.*remove that directory"):
        find_shared_server()
    state.unlink()
    folder.rmdir()
    assert find_shared_server() is None


def test_a_server_that_ends_is_not_used(state: Path) -> None:
    with state.open("r+b") as server:
        fcntl.flock(server, fcntl.LOCK_EX)
        assert find_shared_server() is None


def test_a_server_that_does_not_answer_makes_the_run_embedded(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        write(state, url=f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        with pytest.raises(SharedServerUnusable, match=f"process {os.getpid()}.* does not answer.*server stop"):
            find_shared_server()


def test_other_settings_and_versions_have_another_server(
    state: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, PREFECT_SERVER_LOGGING_LEVEL

    other = f"sqlite+aiosqlite:///{home}/other.db"
    for setting, value in ((PREFECT_SERVER_LOGGING_LEVEL, "INFO"), (PREFECT_SERVER_DATABASE_CONNECTION_URL, other)):
        with temporary_settings({setting: value}):
            assert find_shared_server() is None
    monkeypatch.setenv("RLM_BATCH_SERVER_IDLE", "60")
    assert find_shared_server() is None
    monkeypatch.undo()
    monkeypatch.setattr("prefect.__version__", "3.0.0")
    assert find_shared_server() is None


def test_the_way_in_which_python_was_started_does_not_matter(state: Path, home: Path) -> None:
    linked_home, environment = home.with_name("linked"), home / "venv"
    linked_home.symlink_to(home)
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    python = environment / "bin" / Path(sys.executable).resolve().name
    program = "from rlm_batch.flows.server.shared import _get_path; print(_get_path())"
    done = subprocess.run(
        [python, "-X", "utf8", "-c", program],
        env={**os.environ, "PREFECT_HOME": str(linked_home), "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(done.stdout.strip()).resolve() == state


def test_the_command_shows_a_server_and_does_not_stop_one_that_is_used(
    state: Path, running: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_servers() == 0
    shown = capsys.readouterr().out
    assert f"process {os.getpid()}, " in shown
    assert " MiB, not in use\n" in shown
    assert f"UI         {running.url.removesuffix('/api')}/login\npassword   {AUTH}\n" in shown
    with state.open("rb") as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        show_servers()
        assert "MiB, in use\n" in capsys.readouterr().out
        with pytest.raises(ConfigurationError, match=r"a command uses the shared Prefect server.*--force"):
            stop_servers(force=False)


def test_the_command_says_that_no_server_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (show_servers(), stop_servers(force=False)) == (1, 0)
    assert capsys.readouterr().out == f"no shared Prefect server is running in {home}\n" * 2


def test_a_home_that_cannot_be_used_is_a_one_sentence_error() -> None:
    with (
        temporary_settings({PREFECT_HOME: Path("/dev/null/home")}),
        pytest.raises(ConfigurationError, match="PREFECT_HOME is /dev/null/home, where this user cannot create files"),
    ):
        shared.start_shared_server()


@pytest.mark.anyio
async def test_a_run_without_free_file_descriptors_is_refused_at_once() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"cannot open 32 more files .* `ulimit -n 4096`"):
            async with provide_server():
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_only_commands_outside_ci_share_a_server_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLM_BATCH_SERVER", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getsid", lambda _pid: 7)
    assert not wants_shared_server()
    monkeypatch.setenv("RLM_BATCH_SERVER", "shared")
    assert wants_shared_server()
    monkeypatch.delenv("RLM_BATCH_SERVER")
    with use_options():
        assert wants_shared_server()
        monkeypatch.setattr("os.getsid", lambda _pid: 1)  # The container ends with this command.
        monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - pytest restores the old one
        assert not wants_shared_server()
        monkeypatch.setattr("os.getsid", lambda _pid: 7)
        for name, value in (("CI", "true"), ("RLM_BATCH_SERVER", "embedded"), ("RLM_BATCH_SERVER_IDLE", "0")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert not wants_shared_server(), name


@pytest.mark.parametrize(
    ("name", "value", "told", "remedy"),
    [
        ("RLM_BATCH_SERVER", "yes", "RLM_BATCH_SERVER is 'yes': set it to shared or embedded", "embedded"),
        ("RLM_BATCH_SERVER_IDLE", "soon", "RLM_BATCH_SERVER_IDLE is 'soon': set it to seconds, such as 900", "900"),
        ("RLM_BATCH_SERVER_IDLE", "-1", "RLM_BATCH_SERVER_IDLE is '-1'", "0"),
        ("RLM_BATCH_SERVER_IDLE", "nan", "RLM_BATCH_SERVER_IDLE is 'nan'", "0"),
    ],
)
def test_a_wrong_setting_is_a_one_sentence_error_with_a_working_fix(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str, remedy: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as refused:
        wants_shared_server()
    assert told in str(refused.value)
    monkeypatch.setenv(name, remedy)
    wants_shared_server()


def test_the_directory_is_private(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise SharedServerUnusable

    monkeypatch.setattr(shared, "_launch", refuse)
    with pytest.raises(SharedServerUnusable):
        shared.start_shared_server()
    assert stat.S_IMODE((home / "rlm-batch-servers").stat().st_mode) == 0o700
