"""The process of a Prefect server on loopback: its environment, its start, its end, and the last error in its log.

Measured on two cores, with 500 task runs:

- With batches, the recorder takes 9 ms of the server's CPU for a task run, instead of 25 ms. It has recorded all task
  runs 2 s after the last one ends, instead of 11 s.
- The first start on an empty PREFECT_HOME creates a database, which takes 16 to 28 s.
- A restarted server would lose leases that it keeps in memory, and the slots of their holders would stay taken.
- A task that waits for a slot of its tag's limit asks again after up to 10 s by default. 50 tasks of 0.1 s under a
  limit of 4 took 47 to 67 s. With 0.5 s instead, they took 22 s.
"""

import errno
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import httpx
from prefect.settings import get_current_settings

from ...sandbox.errors import ConfigurationError
from ..child_process import build_safe_environment, end_process, start_module
from ..proxies import check_proxies

LEASE_STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    LEASE_STORAGE: "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_TASKS_TAG_CONCURRENCY_SLOT_WAIT_SECONDS": "0.5",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
# Only a server with a worker schedules runs. Without one, the runs would wait for the next worker, all at once.
NO_SCHEDULES = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
}
# Two names of one setting. Prefect prefers the first.
ORIGIN_VARIABLES = ("PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS")
UI_API_URL = "PREFECT_SERVER_UI_API_URL"
# Settings that a server or worker must not take from this process. The command line logs no errors on its console.
CLIENT_SETTINGS = (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL",
)
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
START_TIMEOUT_SECONDS = 120.0  # seconds; Prefect's setting for embedded servers may be longer
POLL_SECONDS = 0.05  # seconds between two looks at a server that starts
# Alembic's error if the database has a revision that this Prefect does not have.
NEWER_DATABASE = "Can't locate revision identified by"


@dataclass
class ServerProcess:
    """The process of a Prefect server on loopback, which refuses requests from web pages of other addresses.

    As a context manager it waits until the server answers, and ends the server at the end of the context. The server's
    output in the file `log` begins at the byte `log_offset`, after that of earlier servers.
    """

    url: str
    auth: str | None
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int

    @classmethod
    def start(
        cls,
        home: Path,
        *,
        log: Path | None = None,
        port: int = 0,
        auth: str | None = None,
        settings: Mapping[str, str] | None = None,
        arguments: Sequence[object] = (),
        outlives: bool = False,
    ) -> Self:
        """Start a server, which ends with this process.

        The server inherits a socket that listens, so no other process can take the port while the server starts. It has
        its own session, which Ctrl-C in a terminal does not reach: it must record the end of an interrupted flow run.

        Args:
            home: The server's PREFECT_HOME, which contains its database by default.
            log: The file of its output, by default `server.log` in `home`.
            port: The port on 127.0.0.1; 0 means a free one.
            auth: The name and password that clients must send, as NAME:PASSWORD.
            settings: Environment variables in addition to those of `build_environment`.
            arguments: Further arguments of `app.py`.
            outlives: Let the server continue when this process ends.

        Raises:
            ConfigurationError: PREFECT_HOME cannot be used, or the port is taken.
        """
        check_proxies()
        create_prefect_home(home)
        log = home / "server.log" if log is None else log
        try:
            listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigurationError(
                f"port {port} is taken: name another with --port; if a Prefect server listens there, use it with "
                f"PREFECT_API_URL=http://127.0.0.1:{port}/api"
            ) from None
        with listener:
            used_port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{used_port}/api"
            environment = build_environment(home) | {"PREFECT__SERVER_FINAL": "1"}
            # By default the UI asks port 4200. Where a person has chosen the port, the UI may have another address.
            if not port or UI_API_URL not in environment:
                environment[UI_API_URL] = url
            if auth is not None:
                environment["PREFECT_SERVER_API_AUTH_STRING"] = auth
            environment |= {**_build_origin_settings(used_port), **(settings or {})}
            offset = log.stat().st_size if log.exists() else 0
            process = start_module(
                "rlm_batch.flows.server.app",
                listener.fileno(),
                *arguments,
                log=log,
                outlives=outlives,
                environment=environment,
                pass_fds=[listener.fileno()],
            )
        return cls(url, auth, process, log, offset)

    @property
    def ui_url(self) -> str:
        """Return the address of the server's UI."""
        return self.url.removesuffix("/api")

    def wait(self) -> Self:
        """Wait until the server answers. If it does not start, end it.

        Raises:
            ConfigurationError: It does not answer in time, or its process ended instead.
        """
        timeout = max(START_TIMEOUT_SECONDS, get_current_settings().server.ephemeral.startup_timeout_seconds)
        deadline = time.monotonic() + timeout
        try:
            while not self._is_healthy():
                if self.poll() is not None:
                    raise self._make_start_error(read_last_line(self.log, self.log_offset))
                if time.monotonic() > deadline:
                    raise self._make_start_error(f"it did not answer within {timeout:g} s")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def _make_start_error(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"the Prefect server did not start: {reason} (its log is {self.log}). Nothing ran: check PREFECT_HOME, or "
            "start a server and set PREFECT_API_URL"
        )

    def _is_healthy(self) -> bool:
        """Return whether the server answers."""
        try:
            # Without `verify=False`, httpx would read certificates, which takes 25 ms of CPU.
            return httpx.get(f"{self.url}/health", timeout=5.0, verify=False, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def poll(self) -> int | None:
        """Return the exit status of the process, or None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """End the process."""
        end_process(self.process)

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


def build_environment(home: Path) -> dict[str, str]:
    """Return the environment of a server or worker. Settings of this process and its profile go before ours."""
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    environment = build_safe_environment({**SERVER_SETTINGS, **os.environ, **settings})
    for name in CLIENT_SETTINGS:
        environment.pop(name, None)
    return environment | {"PREFECT_HOME": str(home.absolute())}


def _build_origin_settings(port: int) -> dict[str, str]:
    """Return the environment variables with the origins that a server on loopback accepts.

    These are its own origins, and those in Prefect's setting PREFECT_SERVER_CORS_ALLOWED_ORIGINS, in the environment or
    in a profile. `*` allows every page.
    """
    suffix = "" if port == 80 else f":{port}"
    origins = [f"http://{name}{suffix}" for name in LOOPBACK_NAMES]
    api = get_current_settings().server.api
    if "cors_allowed_origins" in api.model_fields_set:  # Prefect's default is `*`.
        allowed = [origin.strip().rstrip("/").lower() for origin in api.cors_allowed_origins.split(",")]
        origins += [origin for origin in allowed if origin and origin not in origins]
    return {name: ",".join(origins) for name in ORIGIN_VARIABLES}


def create_prefect_home(home: Path) -> None:
    """Create the directory of a server's database and logs, unless it exists.

    Raises:
        ConfigurationError: The directory cannot be created, or no file in it.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"PREFECT_HOME is {home}, where this user cannot create files ({error.strerror}): set HOME to a directory "
            "where it can, or PREFECT_HOME and RLM_BATCH_RESULTS"
        ) from None


def read_last_error(log: Path, offset: int) -> str:
    """Return the last error in a log after the byte `offset`, or an empty text without errors."""
    pattern = r"[A-Za-z_][\w.]*(Error|Exception|Refused)\b"
    errors = [line for line in _read_lines(log, offset) if re.match(pattern, line)]
    error = errors[-1] if errors else ""
    if NEWER_DATABASE in error:
        return (
            f"a Prefect newer than {version('prefect')} has migrated its database: install that version, or use "
            "another PREFECT_HOME or database"
        )
    return error


def read_last_line(log: Path, offset: int) -> str:
    """Return the last error in a log after the byte `offset`, or else its last line."""
    lines = _read_lines(log, offset) or ["it said nothing"]
    return read_last_error(log, offset) or lines[-1]


def _read_lines(log: Path, offset: int) -> list[str]:
    lines = log.read_bytes()[offset:].decode("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
