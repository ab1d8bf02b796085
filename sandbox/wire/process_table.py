"""A view of the machine's processes, from /proc. The driver and the host use it to find processes that code started."""

from __future__ import annotations

import os


def read_process(pid: int) -> tuple[int, int, str]:
    """Return a process's parent, its start time in clock ticks since boot, and its state. Raises OSError.

    The kernel reports a process as a zombie once its first thread has ended. While other threads live, the state
    returned here is "S" (asleep).
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    state, threads = words[0].decode(), int(words[17])
    return int(words[1]), int(words[19]), "S" if state == "Z" and threads > 1 else state


def read_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the start time, in clock ticks since boot, of every process that has not ended."""
    found: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                parent, started, state = read_process(int(name))
            except OSError:
                continue  # the process has ended in the meantime
            if state not in "ZX":
                found[int(name)] = parent, started
    return found
