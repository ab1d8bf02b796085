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
        # Executions are children of the supervisor.
        supervisors = [self.pid] if self.is_supervisor else children.get(self.pid, [])
        executions = [_list_tree(pid, children) for parent in supervisors for pid in children.get(parent, [])]
        everything = _list_tree(self.pid, children)
        of_code = [pid for tree in executions for pid in tree]  # RLIMIT_NPROC applies only to these.
        for option, limit in self.limits.items():
            if option == "total_memory_mib":
                shares = _measure_memory(everything)
            else:
                pids = everything if option == "total_processes" else of_code
                shares = {pid: len(_list_threads(pid)) for pid in pids}
            if executions and sum(shares.values()) > limit:
                self._exceeded = option
                largest = max(executions, key=lambda tree: sum(shares.get(pid, 0) for pid in tree))
                with suppress(OSError):
                    os.kill(largest[0], signal.SIGKILL)  # The supervisor ends the process's children.


def _list_tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for above in found:
        found += children.get(above, [])
    return found


def _list_threads(pid: int) -> list[str]:
    with suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _measure_memory(pids: list[int]) -> dict[int, int]:
    """Return the MiB of each process. Open files in memory count for one process."""
    held, inodes = dict[int, int](), set[int]()
    for pid in pids:
        # The kernel shows no memory through a thread that has ended.
        for thread, name in itertools.product(_list_threads(pid), MEMORY_FILES):
            private, shared = MEMORY_FILES[name]
            with suppress(OSError, ValueError), open(f"{thread}/{name}") as file:
                kib = {line.partition(":")[0]: int(line.split()[1]) for line in file if line.endswith(" kB\n")}
                if shared in kib:
                    mapped_or_open = max(kib[shared], _measure_files(f"{thread}/fd", inodes))
                    held[pid] = (sum(kib.get(field, 0) for field in private) + mapped_or_open) // 1024
                    break
    return held


def _measure_files(descriptors: str, inodes: set[int]) -> int:
    """Return the KiB of files in memory without a name, and add their inodes to those that count already."""
    kib = 0
    with suppress(OSError):
        for descriptor in os.scandir(descriptors):
            with suppress(OSError):
                status = os.stat(descriptor)
                if os.readlink(descriptor).startswith("/memfd:") and status.st_ino not in inodes:
                    inodes.add(status.st_ino)
                    kib += status.st_blocks // 2
    return kib


@cache
def start_watcher(process: int) -> set[WatchedSandbox]:
    """Start the watcher thread of this process, and return the set of sandboxes that it checks.

    `process` is the id of this process. A fork has no threads, so it starts another watcher for its own id.
    """
    sandboxes = set[WatchedSandbox]()
    threading.Thread(target=_check_forever, args=(sandboxes,), name="rlm-batch-limits", daemon=True).start()
    return sandboxes


def _check_forever(sandboxes: set[WatchedSandbox]) -> None:
    while True:
        started = time.thread_time()
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in read_processes().items() if sandboxes else ():
            children.setdefault(parent, []).append(pid)
        for sandbox in sandboxes.copy():
            sandbox.check(children)
        spent = time.thread_time() - started  # CPU time, without waits on a busy machine
        time.sleep(max(INTERVAL_SECONDS, spent / MAX_SHARE))
