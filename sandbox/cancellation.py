"""Work that a cancellation waits for."""

import asyncio
import logging
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

NOTICE_SECONDS = 1.0  # after which whoever waits for a removal is told of it


async def run_shielded(work: Awaitable[None]) -> None:
    """Lets the work end although the caller is cancelled meanwhile, and only then passes the cancellation on.

    It is passed on from work that fails, too: whoever is cancelled would otherwise go on with handling the error.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            if not task.done():
                raise
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


@contextmanager
def announce_removal(log: logging.Logger) -> Generator[None]:
    """Tells whoever waits that a sandbox is removed which is still starting; those of a second, in one line."""
    notices = _notices.setdefault(asyncio.get_running_loop(), {})
    notice = notices.setdefault(log.name, _RemovalNotice(log))
    notice.add()
    try:
        yield
    finally:
        notice.remove()


class _RemovalNotice:
    """The removals that are under way, and the line of the log that tells how many they are."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """Counts one more; the first is told of in a second."""
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._tell)

    def remove(self) -> None:
        """Counts one less, which has been removed."""
        self._count -= 1
        if not self._count and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        if self._count == 1:
            self._log.warning("1 sandbox is still starting; removing it")
        else:
            self._log.warning("%d sandboxes are still starting; removing them", self._count)


_notices: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _RemovalNotice]] = WeakKeyDictionary()
