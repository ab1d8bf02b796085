"""The launch of a Prefect server's process, without importing Prefect's server in this process.

The import takes a second. The server's process does it at the same time on another processor.
"""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prefect.settings import PREFECT_HOME, get_current_settings

from ...sandbox.errors import ConfigurationError
from ..child_process import build_module_command, build_safe_environment, read_failure_reason

PORTS = range(8000, 9000)  # the ports that Prefect uses for embedded servers
START_ATTEMPTS = 3  # Another process may take the port between the look and the start.
FACTORY = "rlm_batch.flows.server.app:create_closed_app"
APP_DIR = sys.prefix  # uvicorn searches it first, not the working directory. It contains no modules.
# Two names of one setting. Prefect prefers the first.
ORIGIN_VARIABLES = ("PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class EmbeddedServer:
    """The process of an embedded server. Its log in `get_log_path()` begins at the byte `log_offset`."""

    port: int
    process: subprocess.Popen[Any]
    log_offset: int

    @classmethod
    def launch(cls) -> "EmbeddedServer":
        """Start the process as Prefect does, with another application, origins and log. It ends with this process."""
        port = _find_free_port()
        environment = {
            **build_safe_environment(os.environ),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
            **build_origin_settings(port),
        }
        environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # This is for a server with other users.
        # The command line sets this level for its own process. The server's log must show errors.
        environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)
        options = ("--port", port, "--log-level", "error", "--lifespan", "on")
        path = get_log_path()
        create_prefect_home(path.parent)
        with path.open("ab") as log:
            offset = log.tell()
            command = build_module_command(*build_server_arguments(*options))
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return cls(port, process, offset)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: The server does not answer within `timeout` seconds, or its process ended instead.
        """
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if is_healthy(f"http://127.0.0.1:{self.port}/api"):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"it did not answer within {timeout:g} s")
            time.sleep(0.1)
        raise RuntimeError(read_failure_reason(get_log_path(), self.log_offset))


def build_server_arguments(*options: object) -> list[str]:
    """Return uvicorn and its arguments for a server on loopback. It has one process, even if WEB_CONCURRENCY is set."""
    fixed = ["uvicorn", "--factory", FACTORY, "--app-dir", APP_DIR, "--workers", "1", "--host", "127.0.0.1"]
    return [*fixed, *map(str, options)]


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
    """Return whether a Prefect API answers at the address."""
    try:
        # The server has no TLS. Without `verify=False`, httpx would read the certificates, which takes 25 ms of CPU.
        return httpx.get(f"{url}/health", timeout=5.0, verify=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


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


def get_log_path() -> Path:
    """Return the log file of embedded servers, which shows why they ended."""
    return PREFECT_HOME.value() / "embedded-server.log"


def _find_free_port() -> int:
    """Return a free port. Raises OSError if all are taken."""
    for port in random.sample(PORTS, len(PORTS)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free")
