"""The driver's start: the wire is moved out of the code's reach, and the supervisor begins."""

from __future__ import annotations

import fcntl
import os

from .processes import fork_supervisor
from .signals import signal
from .supervisor import Supervisor


def main(watched: bool = False, first: str = "") -> None:
    """Runs the driver on descriptors 0 and 1; `watched` by a process that outlives it, `first` frames given at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the host's terminal is the host's to handle
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if watched:
        fork_supervisor()
    try:
        Supervisor(*_take_wire()).run(first.encode("utf-8"))
    except BrokenPipeError:
        pass
    os._exit(0)


def _take_wire() -> tuple[int, int]:
    """The wire, moved from descriptors 0 and 1 to private ones; what reads or writes there later finds /dev/null."""
    reads = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    writes = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)
    return reads, writes
