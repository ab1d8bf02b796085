"""Waiting for events: the only place in which tests on the host poll.

A limit here guards against a hang and says nothing about speed: only a test that fails anyway reaches it.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

HANG_SECONDS = 150.0  # below the time-out of pytest, so that a wait ends with its own message
POLL_SECONDS = 0.02

T = TypeVar("T")
C = TypeVar("C", bound=Sized)


def wait_until(condition: Callable[[], T], description: str = "", *, timeout: float = HANG_SECONDS) -> T:
    """Wait until the condition returns something true, and return that.

    Args:
        condition: Called again and again; an exception of it ends the wait.
        description: What is waited for, for the message of a failure.
        timeout: Seconds after which the wait has hung; at least 30.

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
    """Wait as `wait_until` does, and let the event loop run meanwhile.

    Args:
        condition: Called again and again, and awaited if it is a coroutine function; an exception of it ends the wait.
        description: What is waited for, for the message of a failure.
        timeout: Seconds after which the wait has hung; at least 30.

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
    """Wait until the function finds nothing, and return what it found last: something only where that stays.

    Args:
        find: Called again and again; returns a collection.
        timeout: Seconds after which what is still found counts as left behind; at least 30.
    """
    deadline = time.monotonic() + timeout
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def _describe(condition: Callable[[], object], description: str, value: object, timeout: float) -> str:
    name = description or getattr(condition, "__name__", repr(condition))
    return f"{name}: still {value!r} after {timeout:g} s"
