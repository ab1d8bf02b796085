"""The watcher: a thread that kills executions of sandboxes with too much memory or too many processes."""

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from ...sandbox.wire.process_table import read_processes

INTERVAL_SECONDS = 0.5
MAX_SHARE = 0.1  # the watcher's maximum part of one processor's time
# Files in /proc, and their fields for private and shared memory. The second counts shared pages in each process. No
# ordinary user may read the first of a process that is not inspectable.
MEMORY_FILES = {
    "smaps_rollup": (("Pss_Anon", "SwapPss"), "Pss_Shmem"),
    "status": (("RssAnon", "VmSwap"), "RssShmem"),
}


@dataclass(eq=False)
class WatchedSandbox:
    """A watched sandbox: the process that was started for it, and its limits by option.

    `is_supervisor`: the process is the supervisor itself, not the supervisor's parent.
    """

    limits: dict[str, int]
    pid: int = 0
    is_supervisor: bool = False
    _exceeded: str = ""

    def take_exceeded_limit(self) -> str:
        """Return the limit that caused a kill since the last call; empty if there was none."""
        exceeded, self._exceeded = self._exceeded, ""
        return exceeded

    def check(self, children: dict[int, list[int]]) -> None:
        """Kill the execution that uses most of an exceeded limit. `children` has all processes by their parent."""
        supervisors = [self.pid] if self.is_supervisor else children.get(self.pid, [])
        executions: list[list[int]] = []  # the processes of each execution, a child of the supervisor first
        for supervisor in supervisors:
            executions += [_list_tree(pid, children) for pid in children.get(supervisor, [])]
        everything = _list_tree(self.pid, children)
        of_code = [pid for pids in executions for pid in pids]
        for option, limit in self.limits.items():
            if option == "total_memory_mib":
                usage = _measure_memory(everything)
            elif option == "total_processes":
                usage = _count_threads(everything)
            else:  # `processes`, like RLIMIT_NPROC, is for the code's processes alone.
                usage = _count_threads(of_code)
            if executions and sum(usage.values()) > limit:
                self._exceeded = option
                largest = max(executions, key=lambda pids: sum(usage.get(pid, 0) for pid in pids))
                with suppress(OSError):
                    os.kill(largest[0], signal.SIGKILL)  # The supervisor ends the process's children.


def _list_tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    """Return a process and all its descendants."""
    tree = [pid]
    for parent in tree:  # The list grows in the loop.
        tree += children.get(parent, [])
    return tree


def _count_threads(pids: list[int]) -> dict[int, int]:
    return {pid: len(_list_threads(pid)) for pid in pids}


def _list_threads(pid: int) -> list[str]:
    with suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _measure_memory(pids: list[int]) -> dict[int, int]:
    """Return the MiB of each process. Open files in memory count for one process."""
    memory: dict[int, int] = {}
    counted_inodes: set[int] = set()
    for pid in pids:
        # The kernel shows no memory through a thread that has ended.
        for thread, file_name in itertools.product(_list_threads(pid), MEMORY_FILES):
            private_fields, shared_field = MEMORY_FILES[file_name]
            kib = _read_kib_fields(f"{thread}/{file_name}")
            if shared_field in kib:
                private = sum(kib.get(field, 0) for field in private_fields)
                mapped_or_open = max(kib[shared_field], _measure_files(f"{thread}/fd", counted_inodes))
                memory[pid] = (private + mapped_or_open) // 1024
                break
    return memory


def _read_kib_fields(path: str) -> dict[str, int]:
    """Return the fields of a file in /proc that are in KiB, by name; empty if it cannot be read."""
    fields: dict[str, int] = {}
    with suppress(OSError, ValueError), open(path) as file:
        for line in file:
            if line.endswith(" kB\n"):
                name, _, value = line.partition(":")
                fields[name] = int(value.split()[0])
    return fields


def _measure_files(descriptors: str, counted_inodes: set[int]) -> int:
    """Return the KiB of a process's open files in memory without a name. Skip counted inodes, and add new ones."""
    kib = 0
    with suppress(OSError):
        for descriptor in os.scandir(descriptors):
            with suppress(OSError):
                status = os.stat(descriptor)
                if os.readlink(descriptor).startswith("/memfd:") and status.st_ino not in counted_inodes:
                    counted_inodes.add(status.st_ino)
                    kib += status.st_blocks // 2
    return kib


@cache
def start_watcher(process: int) -> set[WatchedSandbox]:
    """Start the watcher thread of this process, and return the set of sandboxes that it checks.

    `process` is the id of this process. A forked process has another id, and starts another thread.
    """
    sandboxes = set[WatchedSandbox]()
    threading.Thread(target=_check_forever, args=(sandboxes,), name="rlm-batch-limits", daemon=True).start()
    return sandboxes


def _check_forever(sandboxes: set[WatchedSandbox]) -> None:
    while True:
        started = time.thread_time()
        if sandboxes:
            children: dict[int, list[int]] = {}
            for pid, (parent, _) in read_processes().items():
                children.setdefault(parent, []).append(pid)
            for sandbox in sandboxes.copy():
                sandbox.check(children)
        spent = time.thread_time() - started  # CPU time, without waits on a busy machine
        time.sleep(max(INTERVAL_SECONDS, spent / MAX_SHARE))
