"""The SDK's client, which all sandboxes of an event loop share."""

import asyncio
import contextvars
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import daytona

from ...sandbox.errors import ConfigurationError
from .errors import map_error
from .settings import DaytonaSettings

CLIENT_IDLE_SECONDS = 30.0  # that a client without sandboxes stays open for the next
NAME_PREFIX = "rlm-batch-"  # of what we make at Daytona


class SharedClient:
    """The SDK's client of one event loop, with what it costs to make it shared by every sandbox of that loop."""

    def __init__(self, config: daytona.DaytonaConfig, forget: Callable[[], object]) -> None:
        self.sdk = daytona.AsyncDaytona(config)
        self._users = 0
        self._forget = forget
        self._changed = asyncio.Event()
        # A context of its own: what borrowed the client first shall not be kept alive by it.
        self._task = asyncio.get_running_loop().create_task(self._close_when_idle(), context=contextvars.Context())

    def borrow(self) -> Self:
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


async def borrow_client(settings: DaytonaSettings) -> SharedClient:
    """This loop's client; `release` it when done. Raises ConfigurationError without credentials."""
    if "daytona._async.daytona" not in sys.modules:
        # The SDK imports what a client is made of when it is asked for it, which takes seconds.
        await asyncio.to_thread(getattr, daytona, "AsyncDaytona")
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    api_key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    # The SDK reads what is missing from the environment, once.
    environment = tuple(os.environ.get(f"DAYTONA_{name}") for name in ("API_KEY", "API_URL", "TARGET"))
    key = (api_key, settings.api_url, settings.target, *environment)
    client = clients.get(key)
    if client is None:
        config = daytona.DaytonaConfig(
            # A log that is followed holds a connection: a pool with a limit would come to a standstill.
            api_key=api_key, api_url=settings.api_url, target=settings.target, connection_pool_maxsize=None,
        )  # fmt: skip
        try:
            client = clients[key] = SharedClient(config, lambda: clients.pop(key, None))
        except daytona.DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "no credentials for Daytona: set api_key on the block, or the environment variable DAYTONA_API_KEY"
            ) from error
    return client.borrow()


@asynccontextmanager
async def use_client(settings: DaytonaSettings, failure: str) -> AsyncIterator[SharedClient]:
    """This loop's client for one call. DaytonaErrors become ours: `failure` is what could not be done."""
    client = await borrow_client(settings)
    try:
        yield client
    except daytona.DaytonaError as error:
        raise map_error(error, failure, settings.snapshot) from error
    finally:
        client.release()
