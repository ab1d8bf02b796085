"""Work that a cancellation waits for."""

import asyncio
from collections.abc import Awaitable


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
