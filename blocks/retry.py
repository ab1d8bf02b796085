"""The one loop that makes a provider's call again: each provider says for which errors, and after how long.

No library: per call that succeeds, tenacity and stamina took some 0.1 ms and this 0.2 µs, and a warm execution makes
such calls; stamina logs each retry besides, for the whole process or not at all.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def call_with_retries(
    call: Callable[[], Awaitable[T]], choose_delay: Callable[[Exception, int], float | None]
) -> T:
    """What `call` returns. It is called again `choose_delay(error, attempt)` seconds after an error, the first attempt
    being number 0; where that is None the error is raised.
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
