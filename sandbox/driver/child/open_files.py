"""Unwritten data of open files: it is written before a process is forked, and at an execution's end as Python does."""

from __future__ import annotations

import gc
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_DESCRIPTOR = 5  # the lowest descriptor of a code's file: below are its streams and channel
WATCHED_DESCRIPTORS = 128  # number of checked descriptors; if all are closed, files with higher ones are missed


class OpenFiles:
    """The files that code may have opened. Create this object in the process that children are forked from."""

    def __init__(self) -> None:
        self._inherited: list[Any] = []  # files of the forked process, which gc no longer lists in a fork
        self._poll = select.poll()
        for fd in range(FIRST_DESCRIPTOR, WATCHED_DESCRIPTORS):
            self._poll.register(fd, 0)

    def write_inherited(self) -> None:
        """Flush all files, because each fork would write the data again, and keep a list of them for the forks."""
        self._inherited = _find_writers()
        _flush(self._inherited)

    def write_at_end(self) -> None:
        """Flush files that stay open after the code's names are deleted: in reference cycles or held by other modules.

        This takes a tenth of a millisecond, so it is skipped if no file is open.
        """
        closed = [fd for fd, event in self._poll.poll(0) if event & select.POLLNVAL]
        if len(closed) == WATCHED_DESCRIPTORS - FIRST_DESCRIPTOR:
            return
        _flush([*_find_writers(), *self._inherited])
        gc.collect()  # closes files in cycles, in any order; a compressed file then writes its end


def _find_writers() -> list[Any]:
    import _io

    writers = (_io.TextIOWrapper, _io.BufferedWriter, _io.BufferedRandom)
    found = [item for item in gc.get_objects() if issubclass(type(item), writers)]
    # Text files first: they flush into their binary buffers.
    return sorted(found, key=lambda item: not issubclass(type(item), _io.TextIOWrapper))


def _flush(files: list[Any]) -> None:
    for file in files:
        try:
            file.flush()
        except Exception:  # a closed or read-only file, or a class of the code
            pass
