"""Pipes: what is there to be read of them, what they take, and larger ones for what is large."""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T", bytes, memoryview)

MAX_PARTS = 512  # in one system call, which takes 1,024
READ_BYTES = 64 * 1024  # that are read at a time; a larger buffer would be mapped anew for each read


def read_available(fd: int) -> bytes | None:
    """What is there to be read, empty at the end; None where there is nothing yet."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None


def write_available(fd: int, parts: list[T]) -> list[T]:
    """Writes the parts one after the other; returns those, or the rest of one, that the other side does not take yet.

    Where it takes nothing they are the same list. Raises OSError where there is no other side.
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
    """Asks for a pipe of that many bytes, so that what is large takes few turns of the loop."""
    try:
        fcntl.fcntl(fd, 1031, size)  # F_SETPIPE_SZ, which has a name from Python 3.10 on
    except OSError:
        pass  # a smaller pipe is slower, not wrong
