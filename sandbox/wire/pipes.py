"""Non-blocking reads and writes on pipes, and larger pipe buffers."""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T", bytes, memoryview)

MAX_PARTS = 512  # parts in one writev call; the kernel accepts 1,024
READ_BYTES = 64 * 1024  # per read; malloc would map and unmap a larger buffer for each read


def read_available(fd: int) -> bytes | None:
    """Return the available data, empty at the end of the stream, or None if there is no data yet."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None


def write_available(fd: int, parts: list[T]) -> list[T]:
    """Write as much of the parts as the pipe accepts, and return the unwritten rest.

    If the pipe is full, return the same list object. Raises OSError if the other end is closed.
    """
    try:
        written = os.writev(fd, parts[:MAX_PARTS])
    except BlockingIOError:
        return parts
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []


def widen_pipe(fd: int, size: int) -> None:
    """Request a pipe buffer of `size` bytes, so that large data needs few reads and writes."""
    try:
        fcntl.fcntl(fd, 1031, size)  # F_SETPIPE_SZ; the constant exists only from Python 3.10
    except OSError:
        pass  # a smaller pipe is slower, not wrong
