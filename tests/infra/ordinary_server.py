"""A server of `prefect server start` with Prefect's defaults, such as leases in memory, that a test can restart."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from .bound_process import start_server_process
from .logged_process import choose_port
from .prefect_database import make_prefect_home


class OrdinaryServer:
    """A context manager for the server; its log is in `home`. `database` is a URL, by default SQLite's in `home`."""

    def __init__(self, home: Path, database: str | None = None) -> None:
        self._home, self._port = make_prefect_home(home), choose_port()
        self.url = f"http://127.0.0.1:{self._port}/api"
        others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self._environment = {**others, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        if database is not None:
            self._environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(self._port)]
        log = self._home / "ordinary.log"
        self._process = start_server_process(command, log, self._answers, env=self._environment)

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5, verify=False).status_code == 200
        return False

    def kill(self) -> None:
        """Kill the server's processes with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
