"""Calls of Modal's API that are made again where they are refused for now, or have to be done in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..retry import call_with_retries

T = TypeVar("T")

THROTTLE_SECONDS = 60  # for which a refused call is tried again, unless MODAL_MAX_THROTTLE_WAIT says otherwise
DELAYS_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)  # between attempts at what has to be done in the end


async def retry_refused(call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call that may be made again, and does so while it is refused, for a bounded time."""
    import modal
    from modal.config import config

    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + float(config.get("max_throttle_wait") or 0)

    def choose_delay(error: Exception, attempt: int) -> float | None:
        delay = min(0.1 * 2**attempt, 5.0) * random.uniform(1.0, 1.5)
        is_refused = isinstance(error, modal.exception.ResourceExhaustedError)
        return delay if is_refused and loop.time() + delay <= give_up_at else None

    return await call_with_retries(call, choose_delay)


async def retry_until_done(call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call again whatever Modal says, but that what it is about is not there. Raises the last error."""
    import modal

    def choose_delay(error: Exception, attempt: int) -> float | None:
        is_final = not isinstance(error, modal.exception.Error) or isinstance(error, modal.exception.NotFoundError)
        return None if is_final or attempt == len(DELAYS_SECONDS) else DELAYS_SECONDS[attempt]

    return await call_with_retries(call, choose_delay)
