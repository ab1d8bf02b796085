"""A Prefect server in a subprocess, on the loopback address, with our settings."""

import errno
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from prefect.settings import get_current_settings

from ..flows.child_process import build_module_command
from ..flows.prefect_server import server_environment
from ..flows.proxies import check_proxies
from ..flows.server.launch import API_URL, ServerProcess, check_open_files, show_errors_in_log
from ..sandbox.errors import ConfigurationError

WORK_POOL = "rlm-batch"  # the name of the pool whose workers run our deployments
START_TIMEOUT_SECONDS = 120.0  # seconds; a first start migrates a database, which takes up to 28 s on two cores
END_GRACE_SECONDS = 10.0  # seconds in which a server stores received data


class PrefectServer:
    """A context manager that runs a Prefect server. The server refuses requests from web pages of other addresses.

    Its log is `server.log` in `home`.

    Args:
        home: The server's PREFECT_HOME, which contains its database by default.
        port: The port on 127.0.0.1, by default a free one, which `url` has while the server runs.
        database: The URL of another database.
        auth: The name and password that clients must send, as NAME:PASSWORD.

    Raises:
        ConfigurationError: The port is taken, or the server does not start.
    """

    def __init__(self, home: Path, port: int = 0, database: str | None = None, auth: str | None = None) -> None:
        self.log = home / "server.log"
        self._home = home
        self._port = port
        self.url = API_URL.format(port)  # The value for PREFECT_API_URL.
        self._database = database
        self._auth = auth
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the server's process, or None if the server is not running."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        check_proxies()
        check_open_files()
        log_level = get_current_settings().server.logging_level.lower()
        try:
            server = ServerProcess.launch(self.log, self._build_environment(), port=self._port, log_level=log_level)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigurationError(
                f"port {self._port} is taken: name another with --port; if a Prefect server listens there, use it "
                f"with PREFECT_API_URL={self.url}"
            ) from None
        self._process, self.url = server.process, server.url
        try:
            server.wait_until_ready(START_TIMEOUT_SECONDS)
        except RuntimeError as error:
            self.__exit__()
            raise ConfigurationError(f"the Prefect server did not start: {error} (its log is {self.log})") from None
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
        ui = get_current_settings().server.ui
        if "api_url" in ui.model_fields_set and ui.api_url is not None:
            environment["PREFECT_SERVER_UI_API_URL"] = ui.api_url  # It may come from a profile.
        if self._database is not None:
            environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._database
        if self._auth is not None:
            environment["PREFECT_SERVER_API_AUTH_STRING"] = self._auth
        return environment


def build_environment(home: Path) -> dict[str, str]:
    """Return the environment of a server or worker: this process's, our settings, and `home` as PREFECT_HOME."""
    return show_errors_in_log(server_environment()) | {"PREFECT_HOME": str(home)}


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
