"""How the process of an embedded server starts: without an import of Prefect's server here, which takes a second.

The server's own process imports it at that time, on another processor.
"""

import os
import random
import socket
import subprocess
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_HOME, get_current_settings

from ...sandbox.errors import ConfigurationError
from ..child_process import build_module_command, build_safe_environment
from .origin_guard import APP_DIR, FACTORY, build_origin_settings

PORTS = range(8000, 9000)  # Prefect's, for embedded servers


@dataclass
class LaunchedServer:
    """A server's process that has been started, and may not answer yet."""

    port: int
    process: subprocess.Popen[Any]
    log_offset: int  # the byte of the log from which on it is this process's


def launch_server() -> LaunchedServer:
    """Starts the process, as Prefect does but for the application, the origins and the log; it ends with ours."""
    port = _find_free_port()
    environment = {
        **build_safe_environment(os.environ),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        **get_current_settings().to_environment_variables(exclude_unset=True),
        **build_origin_settings(port),
    }
    environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # of a server for others
    # The command line sets it for itself, and the log is where a person looks for what went wrong.
    environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)
    command = build_module_command("uvicorn", "--factory", FACTORY, "--host", "127.0.0.1")
    # As for the server of `rlm-batch up`.
    options = ["--app-dir", APP_DIR, "--workers", "1", "--port", str(port)]
    options += ["--log-level", "error", "--lifespan", "on"]
    path = get_log_path()
    create_prefect_home(path.parent)
    with path.open("ab") as log:
        offset = log.tell()
        process = subprocess.Popen(
            [*command, *options], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    return LaunchedServer(port, process, offset)


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
    """Where embedded servers write why they end."""
    return PREFECT_HOME.value() / "embedded-server.log"


def _find_free_port() -> int:
    """A port that nobody has. Raises OSError where all are taken."""
    for port in random.sample(PORTS, len(PORTS)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free")
