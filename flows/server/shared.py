"""The shared Prefect server, which the programs of one user start when they need it. It ends when it is idle.

There is one for each machine, PREFECT_HOME, version and group of settings. Its state file has its address, its password
and the identity of its process, in a directory that only this user can read. While that process lives, it holds the
port, so the password reaches no other process.
"""

import fcntl
import hashlib
import json
import os
import platform
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from secrets import token_urlsafe

import httpx
import prefect
from prefect.settings import PREFECT_HOME, get_current_settings

from ...sandbox.errors import ConfigurationError
from ...sandbox.file_lock import try_lock
from ...sandbox.process_identity import is_process_alive, read_own_identity
from ..child_process import STOP_GRACE_SECONDS
from .process import NO_SCHEDULES, POLL_SECONDS, ServerProcess, create_prefect_home

MODE_VARIABLE = "RLM_BATCH_SERVER"
IDLE_VARIABLE = "RLM_BATCH_SERVER_IDLE"
MODES = ("shared", "embedded")
IDLE_SECONDS = 900.0  # seconds after which a server without requests ends
ANSWER_SECONDS = 60.0  # seconds to wait for an answer; on a very busy machine a server took six
STATE_SECONDS = 20.0  # seconds in which a server that answers has written its state file


@dataclass(frozen=True)
class SharedServer:
    """A running shared server, as its state file describes it.

    `lock` is the open state file. While this process holds a shared lock on it, the server does not end.
    """

    url: str
    auth: str
    process: str
    started: float
    path: Path
    lock: int
    log_offset: int  # bytes of the log when this process found the server

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

    def poll(self) -> str | None:
        """Return None while the server's process runs, and then "ended": only its parent gets the exit status."""
        return None if is_process_alive(self.process) else "ended"

    def check_answer(self) -> None:
        """Raise ConfigurationError if the server does not answer, because a run would wait for ever."""
        try:
            httpx.get(f"{self.url}/health", timeout=ANSWER_SECONDS, verify=False, trust_env=False)
        except httpx.TimeoutException:
            raise ConfigurationError(
                f"the shared Prefect server (process {self.pid}) does not answer: end it with rlm-batch server stop"
            ) from None
        except httpx.HTTPError:
            pass  # The server is ending, and `poll` will show it.

    def is_used(self) -> bool:
        """Return whether another process uses the server. Call this only without a lock."""
        is_used = not try_lock(self.lock)
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return is_used

    def stop(self) -> None:
        """End the server, by SIGKILL after `STOP_GRACE_SECONDS`, and remove its state file."""
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        while self.poll() is None:
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the state file, which releases the lock."""
        _used.pop(self.path, None)
        os.close(self.lock)


_used: dict[Path, SharedServer] = {}  # the servers that this process uses, by state file


def wants_shared_server() -> bool:
    """Return whether a run without a configured server uses the shared server: by default, unless `CI` is set.

    Raises:
        ConfigurationError: An environment variable has a wrong value.
    """
    mode = os.environ.get(MODE_VARIABLE) or ("embedded" if os.environ.get("CI") else "shared")
    if mode not in MODES:
        raise ConfigurationError(f"{MODE_VARIABLE} is {mode!r}: set it to {' or '.join(MODES)}, or unset it")
    may_idle = get_idle_seconds() > 0
    has_proc = bool(read_own_identity())  # Without /proc, the server's process could not be recognized.
    return mode == "shared" and may_idle and has_proc


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


def find_shared_server() -> SharedServer | None:
    """Use the running shared server for this process's settings, and return it; None if there is none.

    The server stays in use until `close` is called on it, or this process ends.

    Raises:
        ConfigurationError: The directory of its state file is not private, or the server does not answer.
    """
    path = _get_path()
    used = _used.get(path)
    if used is not None:
        if used.poll() is None:
            return used
        used.close()
    server = _open_state(path)
    if server is None:
        return None
    # An ending server holds the exclusive lock, or its process is dead.
    is_ending = not try_lock(server.lock, is_shared=True) or server.poll() is not None
    if is_ending:
        server.close()
        return None
    server.check_answer()
    return _used.setdefault(path, server)


def start_shared_server() -> SharedServer:
    """Start the shared server and return it. If another command is starting it, wait for that start instead.

    Raises:
        ConfigurationError: PREFECT_HOME cannot be used, or the server did not start.
    """
    folder = _get_folder()
    create_prefect_home(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "start.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return find_shared_server() or _launch(_get_path())


def _launch(path: Path) -> SharedServer:
    """Start a server that writes the state file, and return it. Raises ConfigurationError if it does not start."""
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)  # Otherwise the log would grow with each server.
    launched = ServerProcess.start(
        PREFECT_HOME.value(),
        log=log,
        auth=f"rlm-batch:{token_urlsafe(32)}",
        settings=NO_SCHEDULES,
        arguments=(path, get_idle_seconds()),
        outlives=True,
    ).wait()
    # Reap the server when it ends, if this process still runs.
    threading.Thread(target=launched.process.wait, daemon=True).start()
    deadline = time.monotonic() + STATE_SECONDS
    while time.monotonic() < deadline:  # The server answers just before it writes the file.
        server = find_shared_server()
        if server is not None:
            return server
        time.sleep(POLL_SECONDS)
    launched.stop()
    raise ConfigurationError(f"the shared Prefect server did not write {path}: its log is {log}")


def list_shared_servers() -> Iterator[SharedServer]:
    """Yield the running shared servers of this PREFECT_HOME and machine. They do not count as used by this process.

    Raises:
        ConfigurationError: The directory of the state files is not private.
    """
    for path in sorted(_get_folder().glob("*.json")):
        server = _open_state(path)
        if server is not None:
            if server.poll() is None:
                yield server
            server.close()


def _open_state(path: Path) -> SharedServer | None:
    """Open a state file. Return None if it is missing or damaged.

    Raises:
        ConfigurationError: Another user can read or write the directory of the file.
    """
    if not path.parent.exists():
        return None
    status = path.parent.stat(follow_symlinks=False)
    is_own_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own_directory or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{path.parent} does not belong to this user alone: remove that directory, or set {MODE_VARIABLE}=embedded"
        )
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        state = json.loads(os.read(lock, 10_000))
        log = path.with_suffix(".log")
        offset = log.stat().st_size if log.exists() else 0
        return SharedServer(**state, path=path, lock=lock, log_offset=offset)
    except (OSError, ValueError, TypeError):
        os.close(lock)
        return None


def _get_folder() -> Path:
    return PREFECT_HOME.value().absolute() / "rlm-batch-servers"


def _get_path() -> Path:
    """Return the state file for this machine, this installation and these settings."""
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
