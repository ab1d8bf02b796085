"""The supervisor's event loop: it waits for descriptors and calls their handlers."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class EventLoop:
    """An epoll that calls the handlers of ready descriptors."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.fd = self._poll.fileno()
        self._handlers: dict[int, Callable[[], None]] = {}

    def close(self) -> None:
        self._poll.close()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def flush(self, fd: int, backlog: bytearray, handler: Callable[[], None]) -> bool:
        """Write as much of the backlog as the descriptor takes and remove it. Return False if the other side is closed.

        While a backlog is left, the handler is called when the descriptor takes more.
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

    def run_once(self, timeout: float) -> None:
        for fd, _event in self._poll.poll(timeout):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
