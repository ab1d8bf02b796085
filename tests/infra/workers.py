"""Workers that run as if on other machines.

Each has its own host name, home, PREFECT_HOME and temporary directory, and in tests of root its own namespace of
process ids. All of them share files, like machines on a network file system.
"""

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from prefect.client.orchestration import get_client

from rlm_batch.deployments.deploy import WORK_POOL
from rlm_batch.deployments.up import QUERY_SECONDS
from rlm_batch.flows.child_process import build_module_command
from rlm_batch.flows.server.process import SERVER_SETTINGS

from .bound_process import start_bound_process
from .machine import is_alive, list_descendants

ONLINE_TIMEOUT = 180.0  # seconds for a worker to come online: it first imports Prefect, on shared cores
# Variables of this process that a worker does not inherit: its own machine or its test sets them.
OURS = ("PREFECT_", "RLM_BATCH_", "XDG_", "DAYTONA_", "MODAL_TOKEN", "HOME", "TMPDIR", "PYTEST_")
# The shell is process 1 of the namespace, and takes note of the end of orphans there.
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child=KILL", "sh", "-c")


class Worker:
    """A worker of a pool that runs up to `limit` flow runs at a time; a context manager that kills it at last."""

    def __init__(
        self,
        folder: Path,
        api_url: str,
        name: str,
        *,
        pool: str = WORK_POOL,
        limit: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name, self.folder = name, folder
        which = ("--pool", pool, "--type", "process", "--name", name, "--install-policy", "never")
        command = build_module_command("prefect", "worker", "start", *which, "--limit", limit, outlives=True)
        if os.geteuid() == 0:
            command = [*APART, 'hostname "$0"; "$@"; exit $?', name, *command]
        settings = {**its_own(folder, api_url), **(environment or {})}
        with (folder / "worker.log").open("ab") as log:
            self._process = start_bound_process(
                command,
                end_signal=signal.SIGKILL,
                cwd=folder,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def flow_runs(self) -> dict[int, str]:
        """Map process ids to the ids of the flow runs that the worker runs now."""
        processes: dict[int, str] = {}
        for pid in list_descendants(self._process.pid):
            with suppress(OSError):
                for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if item.startswith(b"PREFECT__FLOW_RUN_ID=") and item[21:].decode() not in processes.values():
                        processes[pid] = item[21:].decode()
        return processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pids = list_descendants(self._process.pid)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while left := [pid for pid in pids if is_alive(pid)]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


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


async def wait_until_online(name: str, pool: str = WORK_POOL) -> None:
    """Wait until the server lists the worker. Raises TimeoutError after `ONLINE_TIMEOUT`."""
    async with get_client() as client, asyncio.timeout(ONLINE_TIMEOUT):
        while name not in {worker.name for worker in await client.read_workers_for_work_pool(pool)}:  # noqa: ASYNC110 - the server sends no event
            await asyncio.sleep(0.2)
