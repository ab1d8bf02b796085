"""A Prefect worker as a process of ours, and the flow runs that it has started, which end before it does."""

import asyncio
import os
import platform
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ..blocks.worker_consent import ALLOWED_PATHS
from .process import PrefectProcess, end_process

QUERY_SECONDS = "2"  # between two looks for runs that are due; Prefect's own 10 s suit a server that many workers ask
RUN_GRACE_SECONDS = 30.0  # seconds for a flow run to remove its sandboxes and to say how it ended
KILL_GRACE_SECONDS = 5.0  # seconds for the kernel to end what was killed


class PrefectWorker(PrefectProcess):
    """The worker of a pool, until `end`. Its log, with that of its flow runs, goes to `worker.log` in the home.

    `auth` is the name and password that the server asks for, as NAME:PASSWORD, if they are not in the environment. Its
    flow runs may use what is below `allowed_paths`, directories as RLM_BATCH_ALLOWED_PATHS has them.
    """

    def __init__(
        self, home: Path, api_url: str, work_pool: str, auth: str | None = None, allowed_paths: str = ""
    ) -> None:
        super().__init__(home, "worker.log")
        self.name = f"rlm-batch@{platform.node()}"
        self.ended_flow_runs: set[str] = set()  # the ids of those that were ended with it
        self._api_url = api_url
        self._pool = work_pool
        self._auth = auth
        self.allowed_paths = allowed_paths

    def launch(self) -> None:
        """Starts its process."""
        environment = self._environment()
        environment.setdefault("PREFECT_WORKER_QUERY_SECONDS", QUERY_SECONDS)
        environment[ALLOWED_PATHS] = self.allowed_paths
        environment["PREFECT_API_URL"] = self._api_url
        if self._auth is not None:
            environment["PREFECT_API_AUTH_STRING"] = self._auth
        which = ("--pool", self._pool, "--type", "process", "--name", self.name, "--install-policy", "never")
        self._launch("prefect", "worker", "start", *which, environment=environment)

    async def end(self, but: tuple[int | None, ...] = ()) -> None:
        """Ends the flow runs, which remove their sandboxes, and then the worker.

        A worker that is told to end kills its flow runs within a second and leaves their states as they are; so they
        are told first. What a worker that died has left is a child of this process where it is a subreaper: all of its
        children are such, apart from those with the ids `but`.
        """
        process, self._process = self._process, None
        if process is None:
            return
        await self._end_runs(process.pid, but)
        await asyncio.to_thread(end_process, process)
        await self._end_runs(None, but)  # of a run that it began meanwhile

    async def _end_runs(self, worker: int | None, but: tuple[int | None, ...]) -> None:
        signalled: set[int] = set()
        clock = asyncio.get_running_loop().time
        deadline = clock() + RUN_GRACE_SECONDS
        while clock() < deadline + KILL_GRACE_SECONDS:
            below = [] if worker is None else list_children(worker)
            orphans = [
                pid for pid in list_children(os.getpid()) if pid not in (worker, *but) and not _has_been_reaped(pid)
            ]
            if not below and not orphans:
                return
            is_late = clock() > deadline
            for pid in (*below, *orphans):
                if is_late or (pid not in signalled and not _is_hook(pid)):
                    self._record_flow_run(pid)
                    signalled.add(pid)
                    _send_signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            await asyncio.sleep(0.1)

    def _record_flow_run(self, pid: int) -> None:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = line.partition(b"=")
                if name == b"PREFECT__FLOW_RUN_ID":
                    self.ended_flow_runs.add(value.decode())


def list_children(pid: int) -> list[int]:
    """The ids of the processes that this one has started and that have not ended."""
    if os.path.exists("/proc/self/task"):
        pids: list[int] = []
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, path.read_text().split())
        return pids
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
        rows = [line.split() for line in ps.stdout or ()]
    if ps.returncode:
        raise subprocess.CalledProcessError(ps.returncode, ps.args)
    return [int(child) for child, parent in rows if int(parent) == pid and int(child) != ps.pid]


def _send_signal(pid: int, number: int) -> None:
    """Sends the signal to the process, and to its group where it has one of its own, as flow runs have."""
    with suppress(ProcessLookupError, PermissionError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)


def _has_been_reaped(pid: int) -> bool:
    """Whether a child of ours has ended, and is no more now."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _is_hook(pid: int) -> bool:
    """Whether it runs a flow's hooks, after the flow run has ended: they clean up as well, and end by themselves."""
    try:
        return b"hook" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
