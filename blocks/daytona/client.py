"""The SDK's client, shared by all sandboxes of an event loop and an account."""

import asyncio
import contextvars
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

import daytona

from ...sandbox.errors import ConfigurationError
from .errors import map_error
from .settings import DaytonaSettings

NAME_PREFIX = "rlm-batch-"  # prefix of every name that this package creates at Daytona
ENVIRONMENT_NAMES = ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID", "API_URL", "SERVER_URL", "TARGET")

# Creating a client is slow. Each has a task that closes it when the loop ends.
_clients: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str | None, ...], tuple[daytona.AsyncDaytona, asyncio.Task[None]]]
]
_clients = WeakKeyDictionary()


async def get_client(settings: DaytonaSettings) -> daytona.AsyncDaytona:
    """Return this loop's client for the account. Raise ConfigurationError without credentials."""
    if "daytona._async.daytona" not in sys.modules:
        # The first access to the client class makes the SDK import its parts, which takes seconds.
        await asyncio.to_thread(getattr, daytona, "AsyncDaytona")
    loop, key = asyncio.get_running_loop(), get_account_key(settings)
    clients = _clients.setdefault(loop, {})
    if key not in clients:
        config = daytona.DaytonaConfig(
            api_key=_get_api_key(settings),
            api_url=settings.get_account_setting("api_url"),
            target=settings.get_account_setting("target"),
            # Following a log occupies a connection, so a limited pool would block all other calls.
            connection_pool_maxsize=None,
        )  # fmt: skip
        try:
            client = daytona.AsyncDaytona(config)
        except daytona.DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "Daytona needs an API key: set the environment variable DAYTONA_API_KEY, or api_key of a saved block"
            ) from error
        # A separate context, so that the client does not keep its first user's context alive.
        clients[key] = client, loop.create_task(_close_at_end(client), context=contextvars.Context())
    return clients[key][0]


async def _close_at_end(client: daytona.AsyncDaytona) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await client.close()


def get_account_key(settings: DaytonaSettings) -> tuple[str | None, ...]:
    """Return the account and region of a client. The SDK reads missing settings from the environment once."""
    environment = (os.environ.get(f"DAYTONA_{name}") for name in ENVIRONMENT_NAMES)
    place = settings.get_account_setting("api_url"), settings.get_account_setting("target")
    return (_get_api_key(settings), *place, *environment)


def _get_api_key(settings: DaytonaSettings) -> str | None:
    key = settings.get_account_setting("api_key")
    return None if key is None else key.get_secret_value()


@asynccontextmanager
async def use_client(settings: DaytonaSettings, failure: str) -> AsyncIterator[daytona.AsyncDaytona]:
    """Yield this loop's client for one call. Convert DaytonaErrors; `failure` says what could not be done."""
    client = await get_client(settings)
    try:
        yield client
    except daytona.DaytonaError as error:
        raise map_error(error, failure) from error
