"""The machine's processes, read from /proc. The driver and the host use it to find processes that code started."""

from __future__ import annotations

import os


def read_process(pid: int) -> tuple[int, int, str]:
    """Return a process's parent, its start time in clock ticks since boot, and its state. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the third field and the following ones (man 5 proc)
    state, parent, threads, started = fields[0].decode(), int(fields[1]), int(fields[17]), int(fields[19])
    if state == "Z" and threads > 1:  # Its first thread has ended, but others live.
        state = "S"
    return parent, started, state


def read_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the start time, in clock ticks since boot, of every process that has not ended."""
    processes: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return processes
    for name in names:
        if name.isdigit():
            try:
                parent, started, state = read_process(int(name))
            except OSError:
                continue  # The process has ended in the meantime.
            if state not in "ZX":
                processes[int(name)] = parent, started
    return processes
