"""The retry loop for calls of a provider. Each provider chooses the errors to retry and the delays.

It uses no library, because each warm execution makes calls: a successful call costs about 0.1 ms with tenacity or
stamina, and 0.2 µs here. Stamina also logs each retry, and this log can be turned off only for the whole process.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def call_with_retries(
    call: Callable[[], Awaitable[T]], choose_delay: Callable[[Exception, int], float | None]
) -> T:
    """Return the result of `call`, with retries.

    After an error, `choose_delay(error, attempt)` returns the seconds before the next attempt, or None to raise the
    error. The first attempt has the number 0.
    """
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
