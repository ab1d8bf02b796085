"""Retries: the delays before them, and the loop for calls of a provider, which chooses the errors to retry.

The loop uses no library, because each warm execution makes calls: a successful call costs about 0.1 ms with tenacity or
stamina, and 0.2 µs here. Stamina also logs each retry, and this log can be turned off only for the whole process.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def compute_backoff(retry: int, first: float = 1.0, longest: float = 60.0) -> float:
    """Return the seconds before a retry, whose number counts from 0.

    They are `first` seconds before the first retry, and double with each retry up to `longest`.
    """
    return min(first * 2 ** min(retry, 30), longest)


async def call_with_retries(
    call: Callable[[], Awaitable[T]], choose_delay: Callable[[Exception, int], float | None]
) -> T:
    """Return the result of `call`. `choose_delay(error, attempt)` returns the seconds before a retry, or None."""
    attempt = 0
    while True:
        try:
            return await call()
        except Exception as error:
            delay = choose_delay(error, attempt)
            if delay is None:
                raise
        await asyncio.sleep(delay)
        attempt += 1
