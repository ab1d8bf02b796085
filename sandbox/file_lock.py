"""Locks on files against other processes, which the kernel releases when the file is closed or the process dies."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any] | int, *, is_shared: bool = False) -> bool:
    """Lock an open file. Return False if another process has locked it.

    Raises OSError if the file system has no locks.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
