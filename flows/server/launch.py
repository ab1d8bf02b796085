"""The launch of a Prefect server's process, without importing Prefect's server in this process.

The import takes a second. The server's process does it at the same time on another processor.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from prefect.settings import PREFECT_HOME, get_current_settings

from ...sandbox.errors import ConfigurationError
from ..child_process import NO_PARENT, build_module_command, build_safe_environment, read_failure_reason

# Two names of one setting. Prefect prefers the first.
ORIGIN_VARIABLES = ("PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
API_URL = "http://127.0.0.1:{}/api"
MIN_OPEN_FILES = 32  # files of a run with one sandbox at a time, or of a server
POLL_SECONDS = 0.05  # seconds between two looks at a server that starts


@dataclass
class ServerProcess:
    """The process of a Prefect server on loopback. Its log in `log` begins at the byte `log_offset`."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int

    @classmethod
    def launch(
        cls,
        log: Path,
        environment: Mapping[str, str],
        *arguments: object,
        port: int = 0,
        log_level: str = "error",
        outlives: bool = False,
    ) -> Self:
        """Start a server's process, which ends with this process.

        The process inherits a socket that listens, so no other process can take the port meanwhile. The process has
        its own session, which Ctrl-C in a terminal does not reach: it must record the end of an interrupted flow run.

        Args:
            log: The file of the server's output.
            environment: The process's environment, to which the address and the allowed origins are added.
            arguments: Further arguments of `app.py`.
            port: The port on 127.0.0.1; 0 means a free one.
            log_level: The level of uvicorn's log.
            outlives: The server continues when this process ends.

        Raises:
            ConfigurationError: The log's directory cannot be used.
            OSError: The port is taken.
        """
        with socket.create_server(("127.0.0.1", port)) as listener:
            port = listener.getsockname()[1]
            url = API_URL.format(port)
            create_prefect_home(log.parent)
            words = ("rlm_batch.flows.server.app", listener.fileno(), log_level, *arguments)
            with log.open("ab") as output:
                offset = output.tell()
                process = subprocess.Popen(
                    build_module_command(*words, parent=NO_PARENT if outlives else None),
                    # By default the UI asks port 4200.
                    env={"PREFECT_SERVER_UI_API_URL": url, **environment, **build_origin_settings(port)},
                    cwd="/" if outlives else None,  # A directory that a process uses cannot be unmounted.
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
        return cls(port, process, log, offset)

    @property
    def url(self) -> str:
        """Return the address of the server's API."""
        return API_URL.format(self.port)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: The server does not answer within `timeout` seconds, or its process ended instead.
        """
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if is_healthy(self.url):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"it did not answer within {timeout:g} s")
            time.sleep(POLL_SECONDS)
        raise RuntimeError(read_failure_reason(self.log, self.log_offset))


def build_embedded_environment() -> dict[str, str]:
    """Return the environment of an embedded server, as Prefect makes it. It has no UI and few services."""
    environment = {
        **build_safe_environment(os.environ),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        **get_current_settings().to_environment_variables(exclude_unset=True),
    }
    environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # This is for a server with other users.
    return show_errors_in_log(environment)


def show_errors_in_log(environment: dict[str, str]) -> dict[str, str]:
    """Remove the level that the command line sets for its own process. A server's log must show errors."""
    environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)
    return environment


def build_origin_settings(port: int) -> dict[str, str]:
    """Return the environment variables that tell a server on loopback its own origins, and those that a person allows.

    A person allows origins with PREFECT_SERVER_CORS_ALLOWED_ORIGINS, a setting of Prefect's, in the environment or in a
    profile. `*` allows every page.
    """
    own = [f"http://{name}" if port == 80 else f"http://{name}:{port}" for name in LOOPBACK_NAMES]
    api = get_current_settings().server.api
    profile = api.cors_allowed_origins if "cors_allowed_origins" in api.model_fields_set else ""  # The default is `*`.
    setting = next((os.environ[name] for name in ORIGIN_VARIABLES if name in os.environ), profile)
    allowed = [origin for item in setting.split(",") if (origin := item.strip().rstrip("/").lower())]
    return dict.fromkeys(ORIGIN_VARIABLES, ",".join(dict.fromkeys([*own, *allowed])))


def is_healthy(url: str) -> bool:
    """Return whether a Prefect API answers at the address on this machine, which no proxy is asked for."""
    try:
        # The server has no TLS. Without `verify=False`, httpx would read the certificates, which takes 25 ms of CPU.
        answer = httpx.get(f"{url}/health", timeout=5.0, verify=False, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def check_open_files() -> None:
    """Raise ConfigurationError if this process cannot open the files of a run: Prefect would try again for ever."""
    with ExitStack() as files:
        try:
            for _ in range(MIN_OPEN_FILES):
                files.enter_context(open(os.devnull))
        except OSError as error:
            raise ConfigurationError(
                f"this process cannot open {MIN_OPEN_FILES} more files ({error.strerror}): raise the limit with "
                "`ulimit -n 4096` first"
            ) from None


def create_prefect_home(home: Path) -> None:
    """Create the directory of a server's database and logs, unless it exists.

    Raises:
        ConfigurationError: The directory cannot be created, or no file in it.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"0")  # A full disk can create files, and takes no byte.
    except OSError as error:
        raise ConfigurationError(
            f"PREFECT_HOME is {home}, where this user cannot create files ({error.strerror}): set HOME to a directory "
            "where it can, or PREFECT_HOME and RLM_BATCH_RESULTS"
        ) from None


def get_log_path() -> Path:
    """Return the log file of embedded servers, which shows why they ended."""
    return PREFECT_HOME.value() / "embedded-server.log"
