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
ENVIRONMENT_NAMES = ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID", "API_URL", "SERVER_URL", "TARGET")


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
    key = get_account_key(settings)
    client = clients.get(key)
    if client is None:
        config = daytona.DaytonaConfig(
            api_key=_get_api_key(settings), api_url=settings.api_url, target=settings.target,
            # A log that is followed holds a connection: a pool with a limit would come to a standstill.
            connection_pool_maxsize=None,
        )  # fmt: skip
        try:
            client = clients[key] = SharedClient(config, lambda: clients.pop(key, None))
        except daytona.DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "no credentials for Daytona: set api_key on the block, or the environment variable DAYTONA_API_KEY"
            ) from error
    return client.borrow()


def get_account_key(settings: DaytonaSettings) -> tuple[str | None, ...]:
    """Whose sandboxes a client makes, and where: what the block does not say the SDK reads in the environment, once."""
    environment = (os.environ.get(f"DAYTONA_{name}") for name in ENVIRONMENT_NAMES)
    return (_get_api_key(settings), settings.api_url, settings.target, *environment)


def _get_api_key(settings: DaytonaSettings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key is not None else None


@asynccontextmanager
async def use_client(settings: DaytonaSettings, failure: str) -> AsyncIterator[SharedClient]:
    """This loop's client for one call. DaytonaErrors become ours: `failure` is what could not be done."""
    client = await borrow_client(settings)
    try:
        yield client
    except daytona.DaytonaError as error:
        raise map_error(error, failure) from error
    finally:
        client.release()
