"""A Prefect server in a subprocess, on the loopback address, with our settings."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from prefect.settings import get_current_settings

from ..flows.child_process import build_module_command, read_failure_reason
from ..flows.prefect_server import server_environment
from ..flows.proxies import check_proxies
from ..flows.server.launch import build_origin_settings, build_server_arguments, create_prefect_home, is_healthy
from ..sandbox.errors import ConfigurationError

WORK_POOL = "rlm-batch"  # the name of the pool whose workers run our deployments
START_TIMEOUT_SECONDS = 120.0  # seconds; a first start migrates a database, which takes up to 28 s on two cores
END_GRACE_SECONDS = 10.0  # seconds in which a server stores received data


class PrefectServer:
    """A context manager that runs a Prefect server. The server refuses requests from web pages of other addresses.

    Its log is `server.log` in `home`.

    Args:
        home: The server's PREFECT_HOME, which contains its database by default.
        port: The port on 127.0.0.1, by default a free one.
        database: The URL of another database.
        auth: The name and password that clients must send, as NAME:PASSWORD.

    Raises:
        ConfigurationError: The port is taken, or the server does not start.
    """

    def __init__(
        self, home: Path, port: int | None = None, database: str | None = None, auth: str | None = None
    ) -> None:
        self.log = home / "server.log"
        self._home = home
        self._port = _find_free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self._port}/api"  # The value for PREFECT_API_URL.
        self._database = database
        self._auth = auth
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the server's process, or None if the server is not running."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        check_proxies()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise ConfigurationError(
                    f"port {self._port} is taken: name another with --port; if a Prefect server listens there, use it "
                    f"with PREFECT_API_URL={self.url}"
                )
        create_prefect_home(self._home)
        log_offset = self.log.stat().st_size if self.log.exists() else 0
        self._process = start_process(self.log, *self._build_command(), environment=self._build_environment())
        try:
            self._wait_until_ready(self._process, log_offset)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process)

    def _build_environment(self) -> dict[str, str]:
        environment = build_environment(self._home)
        environment.pop("PREFECT_API_URL", None)
        environment.setdefault("PREFECT_SERVER_UI_API_URL", self.url)  # By default the UI asks port 4200.
        if self._database is not None:
            environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._database
        if self._auth is not None:
            environment["PREFECT_SERVER_API_AUTH_STRING"] = self._auth
        return environment | build_origin_settings(self._port)

    def _build_command(self) -> list[str]:
        """Return the command of `prefect server start`, with our application in place of Prefect's."""
        settings = get_current_settings().server
        return build_server_arguments(
            *("--port", self._port),
            *("--log-level", settings.logging_level.lower()),
            *("--timeout-keep-alive", settings.api.keepalive_timeout),
            *("--ws-ping-interval", settings.api.websocket_ping_interval),
            *("--ws-ping-timeout", settings.api.websocket_ping_timeout),
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log_offset: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if is_healthy(self.url):
                return
            time.sleep(0.1)
        reason = read_failure_reason(self.log, log_offset)
        raise ConfigurationError(f"the Prefect server did not start: {reason} (its log is {self.log})")


def build_environment(home: Path) -> dict[str, str]:
    """Return the environment of a server or worker: this process's, our settings, and `home` as PREFECT_HOME."""
    environment = server_environment()
    environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)  # It silences the command line, but not logs.
    return environment | {"PREFECT_HOME": str(home)}


def start_process(log: Path, *words: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -m` with these words, in a session that Ctrl-C does not reach. It ends when this process ends."""
    with log.open("ab") as output:
        return subprocess.Popen(
            build_module_command(*words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session, by SIGKILL after `END_GRACE_SECONDS`. An ended process is not an error."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
