"""Work that must finish before a cancellation takes effect."""

import asyncio
import logging
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

NOTICE_SECONDS = 1.0  # seconds until a running removal is logged


async def run_shielded(work: Awaitable[None]) -> None:
    """Run the work to its end even if the caller is cancelled meanwhile, then raise the cancellation.

    The cancellation also replaces an error of the work. Otherwise the cancelled caller would handle the error and
    continue.
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
    """Log a warning if removing a starting sandbox takes long. Removals within a second share one line."""
    notices = _notices.setdefault(asyncio.get_running_loop(), {})
    notice = notices.setdefault(log.name, _RemovalNotice(log))
    notice.add()
    try:
        yield
    finally:
        notice.remove()


class _RemovalNotice:
    """The running removals of one logger, and the timer for the line that counts them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """Count a removal. The first one starts the timer."""
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._tell)

    def remove(self) -> None:
        """Remove a finished removal from the count. The last one stops the timer."""
        self._count -= 1
        if not self._count and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        if self._count == 1:
            self._log.warning("removing 1 sandbox that is still starting")
        else:
            self._log.warning("removing %d sandboxes that are still starting", self._count)


_notices: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _RemovalNotice]] = WeakKeyDictionary()
