"""The loop's half of the supervisor: descriptors that are waited for, and what is called when they are ready."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class EventLoop:
    """Waits for descriptors on an epoll, and calls the handlers of those that are ready."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.fd = self._poll.fileno()
        self._handlers: dict[int, Callable[[], None]] = {}

    def close(self) -> None:
        self._poll.close()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Calls the handler when there is something to read."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def flush(self, fd: int, backlog: bytearray, handler: Callable[[], None]) -> bool:
        """Writes what the other side takes, and removes it from the backlog; false where the other side is gone.

        For as long as a backlog is left, the handler is called when the descriptor takes more.
        """
        is_open, written = True, 0
        view = memoryview(backlog)
        try:
            while written < len(view):
                written += os.write(fd, view[written:])
        except BlockingIOError:
            pass
        except OSError:
            is_open, written = False, len(view)
        view.release()
        del backlog[:written]
        is_watched = fd in self._handlers
        if backlog and not is_watched:
            self._handlers[fd] = handler
            self._poll.register(fd, select.EPOLLOUT)
        elif not backlog and is_watched:
            self.unwatch(fd)
        return is_open

    def run_once(self, timeout: float) -> bool:
        """Waits that many seconds at most, and calls the handlers; whether there were any to call."""
        events = self._poll.poll(timeout)
        for fd, _event in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        return bool(events)
