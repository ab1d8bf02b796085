"""What open files hold and have not written: before a process is forked, and at an execution's end, as Python's own."""

from __future__ import annotations

import gc
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_DESCRIPTOR = 5  # that can be a file of the code's: below are its streams and channel
WATCHED_DESCRIPTORS = 128  # who has closed all of these and left a higher one open has that lost


class OpenFiles:
    """The files of a process, of those that its code may have opened.

    Made in the process that children are forked from.
    """

    def __init__(self) -> None:
        self._inherited: list[Any] = []  # that a fork has of the process that it is of, whose objects gc lists no more
        self._poll = select.poll()
        for fd in range(FIRST_DESCRIPTOR, WATCHED_DESCRIPTORS):
            self._poll.register(fd, 0)

    def write_inherited(self) -> None:
        """Writes out what they hold, for each fork would do it again; and remembers them for that."""
        self._inherited = _find_writers()
        _flush(self._inherited)

    def write_at_end(self) -> None:
        """Writes out what they hold when the code's names are gone: files in cycles, and those that others have.

        It takes a tenth of a millisecond, so that it is not done where nothing is open.
        """
        closed = [fd for fd, event in self._poll.poll(0) if event & select.POLLNVAL]
        if len(closed) == WATCHED_DESCRIPTORS - FIRST_DESCRIPTOR:
            return
        _flush([*_find_writers(), *self._inherited])
        gc.collect()  # those of a cycle are closed, in any order: a compressed one writes its end then


def _find_writers() -> list[Any]:
    import _io

    writers = (_io.TextIOWrapper, _io.BufferedWriter, _io.BufferedRandom)
    found = [item for item in gc.get_objects() if issubclass(type(item), writers)]
    # What a text file holds goes to its buffer first.
    return sorted(found, key=lambda item: not issubclass(type(item), _io.TextIOWrapper))


def _flush(files: list[Any]) -> None:
    for file in files:
        try:
            file.flush()
        except Exception:  # a closed one, one that is read, or a class of the code's own
            pass
