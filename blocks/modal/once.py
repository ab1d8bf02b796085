"""What is made once for the process: by whoever asks first, and waited for by those who ask meanwhile."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_made: dict[Hashable, Any] = {}
_making: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_making = weakref.WeakKeyDictionary()


async def make_once(key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
    """What `make` makes, made once for a key; who asks meanwhile waits for it, and may be cancelled alone."""
    if key in _made:
        return _made[key]
    making = _making.setdefault(asyncio.get_running_loop(), {})
    task = making.get(key)
    if task is None:

        async def run() -> T:
            try:
                _made[key] = await make()
                return _made[key]
            finally:
                del making[key]

        task = making[key] = asyncio.create_task(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it
    return await asyncio.shield(task)


def forget_made(account_key: tuple[Hashable, ...]) -> None:
    """Drops images and volumes, which others may have removed."""
    for key in list(_made):
        if isinstance(key, tuple) and key[0] != "account" and key[1 : 1 + len(account_key)] == account_key:
            del _made[key]
