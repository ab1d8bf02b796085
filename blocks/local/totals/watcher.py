"""The watcher: a thread that sums what sandboxes hold, and kills what goes beyond their limits."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....sandbox.wire.process_table import read_process, read_processes
from .usage import measure_file_system, measure_folders, measure_processes

log = logging.getLogger("rlm_batch.local")

INTERVAL_SECONDS = 0.5
MAX_SHARE = 0.1  # of one processor's time that it takes, however much there is to sum
MIB = 1024 * 1024

Processes = dict[int, tuple[int, int]]  # each one's parent, and when it was started


@dataclass(eq=False)
class WatchedSandbox:
    """A sandbox that is watched: the process that was started for it, its folders, its limits by their options' names.

    `has_own_shm`: /dev/shm is a file system of its own. `is_supervisor`: the process is the supervisor itself, and not
    what has it below.
    """

    folders: tuple[Path, ...]
    limits: dict[str, int]
    has_own_shm: bool
    pid: int = 0
    is_supervisor: bool = False
    _is_used: bool = False  # it has been sent code; what it has before that waits for some
    _prepares_at: int | None = None  # in the kernel's ticks, if the first execution is what others are forks of
    _prepared: tuple[int, int] | None = None  # its id, and when it was started
    _exceeded: list[str] = field(default_factory=list[str])

    def expect_execution(self, *, is_preparation: bool) -> None:
        """Hears that code is about to run in it; `is_preparation`: in the process that executions will be forks of."""
        self._is_used = True
        if is_preparation:
            self._prepares_at = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def take_exceeded_limit(self) -> str:
        """The limit for which something was killed since this was last asked; empty where there was none."""
        exceeded, self._exceeded = self._exceeded, []
        return exceeded[0] if exceeded else ""

    def check(self, processes: Processes) -> None:
        """Kills the execution that holds the most, where the limit on something is passed; all, for disk space."""
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in processes.items():
            children.setdefault(parent, []).append(pid)
        # The executions are below the supervisor.
        supervisors = [self.pid] if self.is_supervisor else children.get(self.pid, [])
        executions = {pid: _list_tree(pid, children) for parent in supervisors for pid in children.get(parent, [])}
        if not executions or not self._is_used:
            return
        if self._prepares_at is not None and self._prepared is None:
            later = [(pid, processes[pid][1]) for pid in executions if processes[pid][1] >= self._prepares_at]
            self._prepared = min(later, key=lambda process: process[1], default=None)
        everything = list(_list_tree(self.pid, children))
        shm = measure_file_system(supervisors[0], "dev/shm") if self.has_own_shm else 0
        memory_limit = self.limits.get("total_memory_mib", 0) * MIB
        usage = measure_processes(everything, shm, memory_limit or 1 << 62)
        if memory_limit and usage.total_memory > memory_limit:
            self._kill("total_memory_mib", executions, usage.memory, processes, memory_limit)
        of_code = {pid for below in executions.values() for pid in below}  # which alone the kernel's limit is for
        for name, counted in (("total_processes", set(everything)), ("processes", of_code)):
            if name in self.limits and sum(usage.tasks[pid] for pid in counted) > self.limits[name]:
                self._kill(name, executions, usage.tasks, processes, self.limits[name])
        disk_limit = self.limits.get("disk_mib", 0) * MIB
        if disk_limit and usage.deleted_files + measure_folders(self.folders) > disk_limit:
            self._kill("disk_mib", executions, None, processes)

    def _kill(
        self,
        limit: str,
        executions: dict[int, list[int]],
        shares: dict[int, int] | None,
        processes: Processes,
        most: int = 0,
    ) -> None:
        self._exceeded.append(limit)
        pids = list(executions)
        if shares is not None:
            held = {pid: sum(shares.get(below, 0) for below in executions[pid]) for pid in pids}
            # With what is prepared every later execution would go: it does where without them it is too much too.
            prepared = [pid for pid in pids if (pid, processes[pid][1]) == self._prepared and held[pid] <= most]
            pids = [max([pid for pid in pids if pid not in prepared] or prepared, key=held.__getitem__)]
        for pid in pids:
            _kill_process(pid, processes[pid][1])  # what it has started ends with it: the supervisor sees to that


def _kill_process(pid: int, started: int) -> None:
    """Kills the process that had this id when it was listed, and no other that has got the id since."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if read_process(pid)[1] == started:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _list_tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for above in found:
        found += children.get(above, [])
    return found


class Watcher:
    """Watches the sandboxes of this process, in one thread, for as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandboxes: set[WatchedSandbox] = set()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def add(self, sandbox: WatchedSandbox) -> None:
        """Watches a sandbox, whose process has been started, until it is removed."""
        with self._lock:
            if self._owner != os.getpid():  # a fork has the names of its parent's sandboxes, and none of its threads
                self._owner, self._thread, self._sandboxes = os.getpid(), None, set()
            self._sandboxes.add(sandbox)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rlm-batch-limits", daemon=True)
                self._thread.start()

    def remove(self, sandbox: WatchedSandbox) -> None:
        """Watches it no longer."""
        with self._lock:
            self._sandboxes.discard(sandbox)

    def _run(self) -> None:
        for sandboxes in self._list_rounds():
            started = time.thread_time()
            processes = read_processes()
            for sandbox in sandboxes:
                try:
                    sandbox.check(processes)
                except Exception as error:  # noqa: BLE001 - whatever one sandbox brings about, the others stay watched
                    log.warning("the limits of a local sandbox could not be looked at: %r", error)
            spent = time.thread_time() - started  # and not what a busy machine kept it waiting
            time.sleep(max(INTERVAL_SECONDS, spent / MAX_SHARE))

    def _list_rounds(self) -> Iterator[list[WatchedSandbox]]:
        while True:
            with self._lock:
                if not self._sandboxes:
                    self._thread = None
                    return
                sandboxes = list(self._sandboxes)
            yield sandboxes


watcher = Watcher()
