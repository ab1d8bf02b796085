"""The SDK's client, which all sandboxes of an event loop share."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .sdk import get_sdk, import_client

if TYPE_CHECKING:
    from daytona import AsyncDaytona

CLIENT_IDLE_SECONDS = 30.0  # that a client without sandboxes stays open for the next


class SharedClient:
    """The SDK's client of one event loop, with what it costs to make it shared by every sandbox of that loop."""

    def __init__(self, access: tuple[str | None, str | None, str | None], forget: Callable[[], object]) -> None:
        api_key, url, target = access
        config = get_sdk().DaytonaConfig(
            # A log that is followed holds a connection: a pool with a limit would come to a standstill.
            api_key=api_key, api_url=url, target=target, connection_pool_maxsize=None,
        )  # fmt: skip
        self.sdk: AsyncDaytona = get_sdk().AsyncDaytona(config)
        self._users = 0
        self._forget = forget
        self._changed = asyncio.Event()
        # A context of its own: what borrowed the client first shall not be kept alive by it.
        self._task = asyncio.get_running_loop().create_task(self._close_when_idle(), context=contextvars.Context())

    def borrow(self) -> SharedClient:
        """The client, for one more sandbox or call; it is to be released."""
        self._users += 1
        self._changed.set()
        return self

    def release(self) -> None:
        """Gives back what was borrowed."""
        self._users -= 1
        self._changed.set()

    async def _close_when_idle(self) -> None:
        """Closes the client when nobody has used it for a while, or when the loop ends."""
        try:
            while True:
                try:
                    async with asyncio.timeout(None if self._users else CLIENT_IDLE_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    if not self._users:
                        return
                self._changed.clear()
        finally:
            self._forget()
            await self.sdk.close()


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, SharedClient]] = WeakKeyDictionary()


async def borrow_client(access: tuple[str | None, str | None, str | None]) -> SharedClient:
    """This loop's client; `release` it when done. Raises DaytonaAuthenticationError without credentials."""
    if "daytona._async.daytona" not in sys.modules:
        await asyncio.to_thread(import_client)
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    # The SDK reads what is missing from the environment, once.
    key = (*access, *(os.environ.get(f"DAYTONA_{name}") for name in ("API_KEY", "API_URL", "TARGET")))
    client = clients.get(key)
    if client is None:
        client = clients[key] = SharedClient(access, lambda: clients.pop(key, None))
    return client.borrow()
