"""The SDK's client, shared by all sandboxes of an event loop and an account."""

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

CLIENT_IDLE_SECONDS = 30.0  # seconds that a client without sandboxes stays open for the next one
NAME_PREFIX = "rlm-batch-"  # prefix of every name that this package creates at Daytona
ENVIRONMENT_NAMES = ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID", "API_URL", "SERVER_URL", "TARGET")


class SharedClient:
    """The SDK's client for one event loop and account. Creating a client is slow, so their sandboxes share it."""

    def __init__(self, config: daytona.DaytonaConfig, forget: Callable[[], object]) -> None:
        self.sdk = daytona.AsyncDaytona(config)
        self._users = 0
        self._forget = forget
        self._changed = asyncio.Event()
        # A separate context, so that the client does not keep its first user's context alive.
        self._task = asyncio.get_running_loop().create_task(self._close_when_idle(), context=contextvars.Context())

    def borrow(self) -> Self:
        """Return the client for another sandbox or call. The borrower calls `release` later."""
        self._users += 1
        self._changed.set()
        return self

    def release(self) -> None:
        """Give the client back after `borrow`. An unused client closes later."""
        self._users -= 1
        self._changed.set()

    async def _close_when_idle(self) -> None:
        """Close the client when it has been unused for `CLIENT_IDLE_SECONDS`, or when the loop ends."""
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
    """Return this loop's client; call `release` when done. Raise ConfigurationError without credentials."""
    if "daytona._async.daytona" not in sys.modules:
        # The first access to the client class makes the SDK import its parts, which takes seconds.
        await asyncio.to_thread(getattr, daytona, "AsyncDaytona")
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    key = get_account_key(settings)
    client = clients.get(key)
    if client is None:
        config = daytona.DaytonaConfig(
            api_key=_get_api_key(settings),
            api_url=settings.get_account_setting("api_url"),
            target=settings.get_account_setting("target"),
            # Following a log occupies a connection, so a limited pool would block all other calls.
            connection_pool_maxsize=None,
        )  # fmt: skip
        try:
            client = clients[key] = SharedClient(config, lambda: clients.pop(key, None))
        except daytona.DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "Daytona needs an API key: set the environment variable DAYTONA_API_KEY, or api_key of a saved block"
            ) from error
    return client.borrow()


def get_account_key(settings: DaytonaSettings) -> tuple[str | None, ...]:
    """Return the account and region of a client. The SDK reads missing settings from the environment once."""
    environment = (os.environ.get(f"DAYTONA_{name}") for name in ENVIRONMENT_NAMES)
    place = settings.get_account_setting("api_url"), settings.get_account_setting("target")
    return (_get_api_key(settings), *place, *environment)


def _get_api_key(settings: DaytonaSettings) -> str | None:
    key = settings.get_account_setting("api_key")
    return None if key is None else key.get_secret_value()


@asynccontextmanager
async def use_client(settings: DaytonaSettings, failure: str) -> AsyncIterator[SharedClient]:
    """Borrow this loop's client for one call. Convert DaytonaErrors; `failure` says what could not be done."""
    client = await borrow_client(settings)
    try:
        yield client
    except daytona.DaytonaError as error:
        raise map_error(error, failure) from error
    finally:
        client.release()
