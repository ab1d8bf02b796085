"""Processes of this machine, as the kernel lists them."""

import contextlib
import os
from pathlib import Path


def list_descendants(pid: int) -> list[int]:
    """List the ids of all descendants of a process, parents first."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):  # the process ended meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):  # the thread ended meanwhile
                    pids += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return pids[1:]


def read_parent(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is neither a zombie nor dead."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
