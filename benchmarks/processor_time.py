"""CPU seconds that this machine, or a process and its children, have used so far."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def read_machine_seconds() -> float:
    """Return the CPU seconds of all processes of the machine, including the kernel's own work."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, words)
    return (user + nice + system + interrupts + soft + stolen) / TICKS_PER_SECOND


def read_process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants, including ended ones."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                with contextlib.suppress(OSError):
                    used += read_process_seconds(int(child))
    return used
