"""Workers and other commands that run as if on other machines.

Each has its own host name, home, PREFECT_HOME and temporary directory. If the kernel allows it (`worker.apart`), it
also has its own Linux namespaces, in which it reaches only the server and the requested ports: see machine.py. All of
them share files, like machines on a network file system.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from prefect.client.orchestration import get_client

from rlm_batch.deployments.deploy import WORK_POOL
from rlm_batch.deployments.up import QUERY_SECONDS
from rlm_batch.flows.child_process import build_module_command
from rlm_batch.flows.server.process import SERVER_SETTINGS

from .machine import list_descendants

MACHINE = Path(__file__).with_name("machine.py")
ONLINE_TIMEOUT = 180.0  # seconds for a worker to come online: it first imports Prefect, on shared cores
# Variables of this process that a worker does not inherit: its own machine or its test sets them.
OURS = ("PREFECT_", "RLM_BATCH_", "XDG_", "DAYTONA_", "MODAL_TOKEN", "HOME", "TMPDIR", "PYTEST_")


class Machine:
    """A command and all of its processes on a separate machine; a context manager that ends them with `kill`.

    `ports` are the loopback ports that it may reach; its output goes to `log`. `pid` is the root process, as numbered
    on this machine. `relay` is the relay's process, which is no part of the machine. `refused` is the reason why it has
    no namespaces, or None.
    """

    def __init__(
        self,
        command: list[str],
        *,
        folder: Path,
        log: Path,
        name: str,
        environment: dict[str, str],
        ports: Iterable[int] = (),
        apart: bool = True,
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = log
        request = {
            "command": command,
            "environment": environment,
            "cwd": str(folder),
            "log": str(log),
            "ports": list(ports),
            "name": name,
            "apart": apart,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(MACHINE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal reaches only the tests
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the machine {name} did not start (status {self._process.wait()})")
        hello = json.loads(line)
        self.pid: int = hello["pid"]
        self.relay = self._process.pid
        self.refused: str | None = hello["refused"]
        while not list_descendants(self.pid) and self.status() is None:  # wait for the command itself
            time.sleep(0.005)

    @property
    def apart(self) -> bool:
        """Return whether the machine has its own namespaces."""
        return self.refused is None

    def status(self) -> int | None:
        """Return the command's status, 128 plus its number for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill everything with SIGKILL, as if the machine lost its power, and wait until all is gone."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(b"kill\n")
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Worker(Machine):
    """A worker of the pool on a separate machine with its own folders; it runs up to `limit` flow runs at a time."""

    def __init__(
        self,
        folder: Path,
        api_url: str,
        name: str,
        *,
        limit: int | None = 1,
        ports: Iterable[int] = (),
        environment: dict[str, str] | None = None,
        apart: bool = True,
    ) -> None:
        which = ("--pool", WORK_POOL, "--type", "process", "--name", name, "--install-policy", "never")
        most = () if limit is None else ("--limit", str(limit))
        super().__init__(
            build_module_command("prefect", "worker", "start", *which, *most, parent=0),
            folder=folder,
            log=folder / "worker.log",
            name=name,
            environment={**its_own(folder, api_url), **(environment or {})},
            ports=[urlsplit(api_url).port or 80, *ports],
            apart=apart,
        )

    def flow_runs(self) -> dict[int, str]:
        """Map process ids to the ids of the flow runs that the worker runs now."""
        processes: dict[int, str] = {}
        for worker in list_descendants(self.pid)[:1]:
            for pid in list_descendants(worker):
                with suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    for item in environment:
                        if item.startswith(b"PREFECT__FLOW_RUN_ID=") and item[21:].decode() not in processes.values():
                            processes[pid] = item[21:].decode()
        return processes


def its_own(folder: Path, api_url: str) -> dict[str, str]:
    """Create the folder with a home and a temporary directory, and return the environment for a process there."""
    home, temporary = folder / "home", folder / "tmp"
    for path in (folder, home, temporary):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)  # sandboxed code passes through it as another user
    return {
        **SERVER_SETTINGS,
        **{key: value for key, value in os.environ.items() if not key.startswith(OURS)},
        "HOME": str(home),
        "PREFECT_HOME": str(home / ".prefect"),
        "TMPDIR": str(temporary),
        "PREFECT_API_URL": api_url,
        "PREFECT_WORKER_QUERY_SECONDS": QUERY_SECONDS,
    }


async def wait_until_online(name: str) -> None:
    """Wait until the server lists the worker. Raises TimeoutError after `ONLINE_TIMEOUT`."""
    async with get_client() as client, asyncio.timeout(ONLINE_TIMEOUT):
        while name not in {worker.name for worker in await client.read_workers_for_work_pool(WORK_POOL)}:  # noqa: ASYNC110 - the server sends no event
            await asyncio.sleep(0.2)
