"""Calls of Daytona's API that are made again where they were lost or refused for now."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..retry import call_with_retries
from .errors import get_retry_after, is_transient
from .sdk import get_sdk

T = TypeVar("T")

CALL_SECONDS = 30.0  # for one call's answer
SETUP_SECONDS = 1800.0  # for a clone, or for pip: some packages are compiled
TRIES = 7  # of a call that may be made twice; with the pauses between them some 7 s
GIVE_UP_SECONDS = 60.0  # without one call's success, or one reconnection's, after which a sandbox is taken for lost
LONGEST_DELAY_SECONDS = 20.0  # that a refused call waits where it is told to wait longer


def get_delay(error: Exception, attempt: int) -> float:
    """Seconds before the next attempt, the first being number 0: what the error asks for, or more each time."""
    asked = get_retry_after(error) or 0.0
    return max(min(asked, LONGEST_DELAY_SECONDS), min(0.1 * 2**attempt, 2.0)) * random.uniform(1.0, 1.5)


async def retry_call(
    call: Callable[[], Awaitable[T]],
    tries: int | None = None,
    *,
    is_passing: Callable[[Exception], bool] = is_transient,
) -> T:
    """Makes a call that may be made twice, and makes it again where it was lost. Raises the last DaytonaError.

    `is_passing` says which DaytonaErrors it is made again after.
    """

    def choose_delay(error: Exception, attempt: int) -> float | None:
        over = attempt + 1 >= (tries or TRIES)
        return (
            get_delay(error, attempt)
            if isinstance(error, get_sdk().DaytonaError) and not over and is_passing(error)
            else None
        )

    return await call_with_retries(call, choose_delay)
