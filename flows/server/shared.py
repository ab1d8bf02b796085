"""The shared Prefect server: commands of one user find it by its state file, or start it, and it ends when it is idle.

There is one for each machine, PREFECT_HOME, version and group of settings. The state file has its address and password,
and is checked before it is used: its owner and mode, the identity of the process, and an answer to a request with the
password. That process holds the port for all its life, so the password reaches no other process.
"""

import fcntl
import hashlib
import json
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from secrets import token_urlsafe

import httpx
import prefect
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME, get_current_settings

from ...sandbox.caller import get_caller
from ...sandbox.errors import ConfigurationError
from ...sandbox.process_identity import is_process_alive, read_own_identity
from ..prefect_server import server_environment
from .launch import POLL_SECONDS, ServerProcess, create_prefect_home, show_errors_in_log

MODE_VARIABLE = "RLM_BATCH_SERVER"
IDLE_VARIABLE = "RLM_BATCH_SERVER_IDLE"
MODES = ("shared", "embedded")
IDLE_SECONDS = 900.0  # seconds
ANSWER_SECONDS = 20.0  # seconds; on a machine with many more processes than processors, a server took six
LOCK_ATTEMPTS = 5
SETTINGS = {
    "PREFECT__SERVER_FINAL": "1",
    # Only a server with a worker schedules runs. Without one, the runs would wait for the next worker, all at once.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
}


class SharedServerUnusable(Exception):
    """A shared server cannot be used, so a command runs an embedded one. The text says why, and what to do."""


@dataclass(frozen=True)
class SharedServer:
    """A running shared server. `lock` is the open state file, whose lock says that this process uses the server."""

    url: str
    auth: str
    process: str
    version: str
    started: float
    path: Path
    lock: int = field(compare=False)

    @property
    def pid(self) -> int:
        """Return the id of the server's process."""
        return int(self.process.split(".")[2])

    @property
    def ui_url(self) -> str:
        """Return the address of the server's UI."""
        return self.url.removesuffix("/api")

    @property
    def log(self) -> Path:
        """Return the server's log."""
        return self.path.with_suffix(".log")

    @property
    def log_offset(self) -> int:
        """Return the length of the log so far."""
        return self.log.stat().st_size if self.log.exists() else 0

    def is_alive(self) -> bool:
        """Return whether the server's process runs."""
        return is_process_alive(self.process) is True

    def poll(self) -> str | None:
        """Return None while the server's process runs, as `Popen.poll` does. Only its parent could get a status."""
        return None if self.is_alive() else "ended"

    def answers(self) -> bool | None:
        """Ask the server a question that needs the password. Return None if there is no answer in time."""
        address = f"{self.url}/admin/version"
        with suppress(OSError):
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT":
                return None  # SIGSTOP suspended the process.
        try:
            answer = httpx.get(
                address,
                auth=tuple(self.auth.split(":", 1)),  # type: ignore[arg-type]
                timeout=ANSWER_SECONDS,
                verify=False,
                trust_env=False,
            )
        except httpx.TimeoutException:
            return None
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def lock_for_use(self) -> bool:
        """Lock the state file, so that the server does not end. Return False if it ends, or has lost the file."""
        for _ in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.lock))
            except BlockingIOError:  # The server ends, or another process looks whether it is in use.
                time.sleep(POLL_SECONDS)
            except OSError:
                break
        return False

    def is_used(self) -> bool:
        """Return whether another process uses the server. Call this only without a lock."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Close the state file, which releases the lock."""
        _used.pop(self.path, None)
        os.close(self.lock)


_used: dict[Path, SharedServer] = {}  # the servers that this process uses, by state file


def wants_shared_server() -> bool:
    """Return whether a run without a configured server uses the shared server.

    Raises:
        ConfigurationError: An environment variable has a wrong value.
    """
    mode = os.environ.get(MODE_VARIABLE, "")
    if mode not in ("", *MODES):
        raise ConfigurationError(f"{MODE_VARIABLE} is {mode!r}: set it to {' or '.join(MODES)}, or unset it")
    if not get_idle_seconds() or mode == "embedded":
        return False
    if not read_own_identity() or _has_relative_database():
        return False  # Without /proc, the server's process could not be recognized.
    return mode == "shared" or (get_caller().is_command and not os.environ.get("CI") and not _ends_with_container())


def get_idle_seconds() -> float:
    """Return the seconds after which an unused server ends; 0 means that there is no shared server."""
    text = os.environ.get(IDLE_VARIABLE, "").strip()
    try:
        seconds = float(text or IDLE_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(
            f"{IDLE_VARIABLE} is {text!r}: set it to seconds, such as {IDLE_SECONDS:g}, or to 0 for no shared server"
        )
    return seconds


def _has_relative_database() -> bool:
    """Return whether the database is a file that depends on the working directory."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value() or ""
    return url.startswith("sqlite") and not url.partition("///")[2].startswith(("/", ":memory:", "file:"))


def _ends_with_container() -> bool:
    """Return whether a container ends with this command, as a step of a Docker build does. It would kill the server."""
    return os.getpid() == 1 or (os.getsid(0) in (0, 1) and not sys.stdin.isatty())


def find_shared_server() -> SharedServer | None:
    """Return the running shared server for this process's settings, or None.

    The server stays in use until `close` is called on it, or this process ends.

    Raises:
        SharedServerUnusable: The server does not answer, or the directory of its state file is not private.
    """
    folder = _get_folder()
    if not folder.exists():
        return None
    _check_folder(folder)
    path = _get_path()
    if (used := _used.get(path)) is not None:
        if used.is_alive():
            return used
        used.close()
    server = _open_state(path)
    if server is None:
        return None
    answers = server.lock_for_use() and server.is_alive() and server.answers()
    if answers:
        return _used.setdefault(path, server)
    server.close()
    if answers is None:
        raise SharedServerUnusable(
            f"the shared Prefect server (process {server.pid}) does not answer, so this run starts its own: end that "
            "one with rlm-batch server stop"
        )
    return None


def start_shared_server() -> SharedServer:
    """Return the shared server that another command starts now, or start it.

    Raises:
        ConfigurationError: PREFECT_HOME cannot be used, or the server did not start.
        SharedServerUnusable: As for `find_shared_server`, or the file system has no locks.
    """
    folder = _get_folder()
    create_prefect_home(folder.parent)
    timeout = float(server_environment()["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])
    deadline = time.monotonic() + timeout
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_folder(folder)
    with ExitStack() as stack:
        while not stack.enter_context(_try_lock(folder / "start.lock")):
            # Another command starts the server.
            if (server := find_shared_server()) is not None:
                return server
            if time.monotonic() > deadline:
                raise SharedServerUnusable(
                    f"another command has been starting the shared Prefect server for {timeout:g} s, so this run "
                    "starts its own"
                )
            time.sleep(POLL_SECONDS)
        return find_shared_server() or _launch(_get_path(), timeout)


def _launch(path: Path, timeout: float) -> SharedServer:
    """Start a server, which replaces the state file, and return it. Raises ConfigurationError if it does not start."""
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)  # A log has the output of one server, so that logs do not grow.
    launched: ServerProcess | None = None
    try:
        environment = _build_environment()
        launched = ServerProcess.launch(log, environment, path, get_idle_seconds(), outlives=True)
        launched.wait_until_ready(timeout)
        deadline = time.monotonic() + ANSWER_SECONDS
        while (server := find_shared_server()) is None:  # The server answers just before it writes the file.
            if launched.process.poll() is not None or time.monotonic() > deadline:
                launched.wait_until_ready(0)
                raise RuntimeError(f"it did not write {path}")
            time.sleep(POLL_SECONDS)
    except (OSError, RuntimeError) as error:
        if launched is not None:
            launched.process.kill()
            launched.process.wait()
        raise ConfigurationError(
            f"the shared Prefect server did not start: {error} (its log is {log}). Nothing ran: check PREFECT_HOME, or "
            f"start a server and set PREFECT_API_URL"
        ) from None
    # Reap the process when it ends, if this process runs then.
    threading.Thread(target=launched.process.wait, daemon=True).start()
    return server


def _build_environment() -> dict[str, str]:
    """Return the environment of a shared server, with a new password."""
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    environment = show_errors_in_log({**server_environment(), **settings, **SETTINGS})
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_UI_API_URL"):
        environment.pop(name, None)
    home, password = str(PREFECT_HOME.value().absolute()), f"rlm-batch:{token_urlsafe(32)}"
    return environment | {"PREFECT_HOME": home, "PREFECT_SERVER_API_AUTH_STRING": password}


def list_shared_servers() -> Iterator[SharedServer]:
    """Yield the running shared servers of this PREFECT_HOME and machine, without using them.

    Raises:
        SharedServerUnusable: The directory of the state files is not private.
    """
    folder = _get_folder()
    if not folder.exists():
        return
    _check_folder(folder)
    for path in sorted(folder.glob("*.json")):
        server = _open_state(path)
        if server is not None:
            if server.is_alive():
                yield server
            server.close()


def _open_state(path: Path) -> SharedServer | None:
    """Open a state file. Return None if it is missing, not private to this user, or no state file."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(lock)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            state = json.loads(os.read(lock, 10_000))
            texts = [str(state[name]) for name in ("url", "auth", "process", "version")]
            if texts[0].startswith("http://127.0.0.1:") and ":" in texts[1] and is_process_alive(texts[2]) is not None:
                return SharedServer(*texts, started=float(state["started"]), path=path, lock=lock)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    os.close(lock)
    return None


def _get_folder() -> Path:
    return PREFECT_HOME.value().absolute() / "rlm-batch-servers"


def _get_path() -> Path:
    """Return the state file for this machine, this installation and these settings.

    The way in which Python was started does not matter, such as by a link to it or with PYTHONPATH.
    """
    settings = get_current_settings().server.to_environment_variables(exclude_unset=True)
    parts = {
        "machine": platform.node(),
        "versions": [version("rlm-batch"), prefect.__version__, str(Path(__file__).resolve().parent)],
        "idle": get_idle_seconds(),
        "home": str(PREFECT_HOME.value().resolve()),
        "settings": dict(sorted(settings.items())),
    }
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return _get_folder() / f"{digest[:16]}.json"


def _check_folder(folder: Path) -> None:
    """Raise SharedServerUnusable unless the directory belongs to this user alone."""
    status = folder.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return
    raise SharedServerUnusable(
        f"{folder} does not belong to this user alone, so this run starts its own Prefect server: remove that directory"
    )


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Lock a file, and yield True unless another process has the lock. Raises SharedServerUnusable without locks."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stack.close()
            yield False
            return
        except OSError as error:
            raise SharedServerUnusable(
                f"{path} cannot be locked ({error.strerror}), so this run starts its own Prefect server: set "
                f"{MODE_VARIABLE}=embedded"
            ) from None
        yield True
