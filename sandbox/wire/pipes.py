"""Pipes: larger ones for what is large, and writes that take what fits."""

from __future__ import annotations

import fcntl
import os

READ_BYTES = 64 * 1024  # that are read at a time; a larger buffer would be mapped anew for each read


def widen_pipe(fd: int, size: int) -> None:
    """Asks for a pipe of that many bytes, so that what is large takes few turns of the loop."""
    try:
        fcntl.fcntl(fd, 1031, size)  # F_SETPIPE_SZ, which has a name from Python 3.10 on
    except OSError:
        pass  # a smaller pipe is slower, not wrong


def write_available(fd: int, backlog: bytearray) -> bool:
    """Writes what the other side takes, and removes it from the backlog; false where the other side is gone."""
    written = 0
    view = memoryview(backlog)
    try:
        while written < len(view):
            written += os.write(fd, view[written:])
    except BlockingIOError:
        pass
    except OSError:
        return False
    finally:
        view.release()
        del backlog[:written]
    return True
