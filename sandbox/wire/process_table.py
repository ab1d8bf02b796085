"""The processes of a machine, as /proc tells of them: driver and host find by it what code has started."""

from __future__ import annotations

import os


def read_process(pid: int) -> tuple[int, int, str]:
    """A process's parent, the clock ticks from the machine's start to its own, and its state. Raises OSError.

    The kernel calls a process a zombie once its first thread has ended; as long as others live, it is asleep here.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    state, threads = words[0].decode(), int(words[17])
    return int(words[1]), int(words[19]), "S" if state == "Z" and threads > 1 else state


def read_processes() -> dict[int, tuple[int, int]]:
    """Every process that has not ended: its parent, and the clock ticks from the machine's start to its own."""
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
                continue  # it ended meanwhile
            if state not in "ZX":
                found[int(name)] = parent, started
    return found
