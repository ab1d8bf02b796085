"""The services of compose.yaml as processes on loopback, with its commands and settings but other addresses."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from .bound_process import start_bound_process
from .logged_process import choose_port
from .postgres import Postgres
from .redis_server import RedisServer

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
START_SECONDS = 120.0


class Servers:
    """A context manager for Postgres, Redis, `count` API servers, the background services, and the balancer.

    `urls` has the address of each API server. `url` is the balancer's address, or None without haproxy. `auth` is the
    API's required credentials. `settings` are added to those of the file.
    """

    def __init__(
        self, home: Path, count: int = 2, auth: str | None = None, settings: dict[str, str] | None = None
    ) -> None:
        self._home = home
        self._settings = {**(settings or {})}
        if auth is not None:
            self._settings["PREFECT_SERVER_API_AUTH_STRING"] = auth
        self._ports = [choose_port() for _ in range(count)]
        self._front = choose_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.postgres, self.redis = Postgres(), RedisServer()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}/api" for port in self._ports]

    @property
    def url(self) -> str | None:
        return f"http://127.0.0.1:{self._front}/api" if "api" in self.processes else None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.postgres)
            stack.enter_context(self.redis)
            stack.callback(self._end)
            self._run("migrate", "migrate").wait(START_SECONDS)
            if self.processes.pop("migrate").returncode != 0:
                raise RuntimeError(f"the database was not made: {self.log('migrate')}")
            self._run("services", "services")
            for number, port in enumerate(self._ports):
                self._run(f"server-{number}", "server", port)
            for number, url in enumerate(self.urls):
                self._wait(url, f"server-{number}")
            if shutil.which("haproxy") is not None:
                self._balance()
                self._wait(f"http://127.0.0.1:{self._front}/api", "api")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, name: str) -> str:
        """Return the log of that process."""
        return (self._home / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, as if its machine failed."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def start(self, name: str) -> None:
        """Restart a killed API server, or the background services."""
        number = int(name.removeprefix("server-")) if name.startswith("server-") else None
        self._run(name, "services" if number is None else "server", None if number is None else self._ports[number])
        if number is not None:
            self._wait(self.urls[number], name)

    def _run(self, name: str, service: str, port: int | None = None) -> subprocess.Popen[bytes]:
        """Start a process with the command and environment of that service."""
        there = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        redis = f"redis://127.0.0.1:{self.redis.port}/0"
        environment = {
            setting: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value).replace("redis://redis:6379/0", redis)
            for setting, value in SERVICES[service]["environment"].items()
            if value is not None and ":?" not in value  # settings that a user must provide
        }
        # Each container has its own home.
        environment["PREFECT_HOME"] = str(self._home / name)
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self.postgres.url
        environment |= self._settings
        program, *arguments = SERVICES[service]["command"]
        if port is not None:
            arguments[arguments.index("--host") + 1] = "127.0.0.1"
            arguments[arguments.index("--port") + 1] = str(port)
        return self._spawn(name, [sys.executable, "-m", program, *arguments], {**there, **environment})

    def _balance(self) -> None:
        """Start the balancer with its own file, but with loopback addresses instead of the container engine's names."""
        lines = (DEPLOYMENTS / "haproxy.cfg").read_text()
        lines, binds = re.subn(r"bind :4200", f"bind 127.0.0.1:{self._front}", lines)
        servers = "\n".join(f"    server server-{port} 127.0.0.1:{port}" for port in self._ports)
        lines, templates = re.subn(r"    server-template .*", servers, lines)
        assert (binds, templates) == (1, 1)
        file = self._home / "haproxy.cfg"
        file.write_text(lines)
        self._spawn("api", ["haproxy", "-f", str(file)], dict(os.environ))

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._home.mkdir(parents=True, exist_ok=True)
        with (self._home / f"{name}.log").open("ab") as log:
            process = start_bound_process(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes[name] = process
        return process

    def _wait(self, url: str, name: str) -> None:
        """Wait until the server answers; restart an ended API server up to twice, like an engine with `restart`.

        API servers that start at the same time on a new database create the same block types, and one of them may fail.
        """
        starts, until = 1, time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5, verify=False).status_code == 200:
                    return
            if self.processes[name].poll() is not None:
                if starts == 3 or not name.startswith("server-"):
                    raise RuntimeError(f"{name} has ended: {self.log(name)[-3000:]}")
                starts += 1
                self._run(name, "server", self._ports[int(name.removeprefix("server-"))])
            time.sleep(0.1)
        raise TimeoutError(f"{name} does not answer at {url}")

    def _end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
