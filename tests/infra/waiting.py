"""Functions that wait for events; tests on the host poll nowhere else.

A limit here guards against a hang and does not check speed: only a test that fails anyway reaches it.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

HANG_SECONDS = 150.0  # seconds, below pytest's time-out, so that a wait fails with its own message
POLL_SECONDS = 0.02

T = TypeVar("T")
C = TypeVar("C", bound=Sized)


def wait_until(condition: Callable[[], T], description: str = "", *, timeout: float = HANG_SECONDS) -> T:
    """Wait until the condition returns something true, and return that.

    Args:
        condition: Called repeatedly; an exception from it ends the wait.
        description: What the wait is for, shown if it fails.
        timeout: Seconds after which the wait counts as hung; at least 30.

    Raises:
        TimeoutError: The condition was still false after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(_describe(condition, description, value, timeout))
        time.sleep(POLL_SECONDS)
    return value


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], description: str = "", *, timeout: float = HANG_SECONDS
) -> T:
    """Wait as `wait_until` does, but let the event loop run meanwhile.

    Args:
        condition: Called repeatedly; an awaitable result is awaited, and an exception from it ends the wait.
        description: What the wait is for, shown if it fails.
        timeout: Seconds after which the wait counts as hung; at least 30.

    Raises:
        TimeoutError: The condition was still false after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        value: T = await answer if inspect.isawaitable(answer) else answer  # type: ignore[assignment]
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(_describe(condition, description, value, timeout))
        await asyncio.sleep(POLL_SECONDS)


def wait_until_empty(find: Callable[[], C], *, timeout: float = 90.0) -> C:
    """Wait until the function finds nothing, and return what it found last, which is empty unless the time ran out.

    Args:
        find: Called repeatedly; returns a collection.
        timeout: Seconds after which the remaining items count as left behind; at least 30.
    """
    deadline = time.monotonic() + timeout
    while (value := find()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return value


def _describe(condition: Callable[[], object], description: str, value: object, timeout: float) -> str:
    name = description or getattr(condition, "__name__", repr(condition))
    return f"{name}: still {value!r} after {timeout:g} s"
