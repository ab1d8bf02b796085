"""Work that must finish before a cancellation takes effect."""

import asyncio
import logging
from collections.abc import Awaitable, Generator
from contextlib import contextmanager

NOTICE_SECONDS = 1.0  # seconds until a running removal is logged


async def run_shielded(work: Awaitable[object]) -> None:
    """Run the work to its end even if the caller is cancelled meanwhile, then raise the cancellation.

    The cancellation replaces an error of the work, because the cancelled caller could handle the error and continue.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise  # The work itself was cancelled.
            cancelled = error
        except BaseException:
            if not task.done():
                raise  # This is not the work's error, which is raised below.
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


@contextmanager
def announce_removal(log: logging.Logger) -> Generator[None]:
    """Log a warning if removing a starting sandbox takes longer than a second."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(NOTICE_SECONDS, log.warning, "removing a sandbox that is still starting")
    try:
        yield
    finally:
        timer.cancel()
