"""The watcher: a thread that measures sandboxes, and kills executions when a limit on a whole sandbox is exceeded."""

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
MAX_SHARE = 0.1  # the watcher's maximum part of one processor's time
MIB = 1024 * 1024

Processes = dict[int, tuple[int, int]]  # parent and start time in clock ticks, by process id


@dataclass(eq=False)
class WatchedSandbox:
    """A watched sandbox: the process that was started for it, its folders, and its limits by option.

    `has_own_shm`: /dev/shm is the sandbox's own file system. `is_supervisor`: the process is the supervisor itself, not
    the supervisor's parent.
    """

    folders: tuple[Path, ...]
    limits: dict[str, int]
    has_own_shm: bool
    pid: int = 0
    is_supervisor: bool = False
    _is_used: bool = False  # True once code was sent; earlier processes only wait
    _prepares_at: int | None = None  # clock ticks since boot at which a preparation was sent
    _prepared: tuple[int, int] | None = None  # id and start time of the prepared process
    _exceeded: list[str] = field(default_factory=list[str])

    def expect_execution(self, *, is_preparation: bool) -> None:
        """Record that code is about to run, with `is_preparation` in the process from which executions are forked."""
        self._is_used = True
        if is_preparation:
            self._prepares_at = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def take_exceeded_limit(self) -> str:
        """Return the limit that caused a kill since the last call; empty if there was none."""
        exceeded, self._exceeded = self._exceeded, []
        return exceeded[0] if exceeded else ""

    def check(self, processes: Processes) -> None:
        """Kill the execution that uses most of an exceeded limit; kill all executions for disk space."""
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in processes.items():
            children.setdefault(parent, []).append(pid)
        # Executions are children of the supervisor.
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
        of_code = {pid for below in executions.values() for pid in below}  # RLIMIT_NPROC applies only to these.
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
            # Every later execution needs the prepared process. It is spared unless it exceeds the limit alone, or
            # there is no other process to kill.
            prepared = [pid for pid in pids if (pid, processes[pid][1]) == self._prepared and held[pid] <= most]
            pids = [max([pid for pid in pids if pid not in prepared] or prepared, key=held.__getitem__)]
        for pid in pids:
            _kill_process(pid, processes[pid][1])  # The supervisor ends the process's children.


def _kill_process(pid: int, started: int) -> None:
    """Kill a process if its start time still matches; a later process may have the same id."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if read_process(pid)[1] == started:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _list_tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for above in found:
        found += children.get(above, [])
    return found


class Watcher:
    """The watcher of this process's sandboxes: one thread, which runs while there are sandboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandboxes: set[WatchedSandbox] = set()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def add(self, sandbox: WatchedSandbox) -> None:
        """Watch a sandbox, whose process has started, until it is removed."""
        with self._lock:
            if self._owner != os.getpid():  # A fork inherits its parent's sandboxes, but not its thread.
                self._owner, self._thread, self._sandboxes = os.getpid(), None, set()
            self._sandboxes.add(sandbox)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rlm-batch-limits", daemon=True)
                self._thread.start()

    def remove(self, sandbox: WatchedSandbox) -> None:
        """Stop watching a sandbox."""
        with self._lock:
            self._sandboxes.discard(sandbox)

    def _run(self) -> None:
        for sandboxes in self._list_rounds():
            started = time.thread_time()
            processes = read_processes()
            for sandbox in sandboxes:
                try:
                    sandbox.check(processes)
                except Exception as error:  # noqa: BLE001 - one sandbox's error must not leave the others unwatched
                    log.warning("the limits of a local sandbox could not be checked: %r", error)
            spent = time.thread_time() - started  # CPU time, without waits on a busy machine
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
