"""The SDK's client, shared by all sandboxes of an event loop and an account."""

import asyncio
import atexit
import contextvars
import os
from contextlib import suppress
from weakref import WeakKeyDictionary

import daytona

from ...sandbox.errors import ConfigurationError
from ..worker_consent import check_key_address
from .settings import DEFAULT_API_URL, DaytonaSettings

NAME_PREFIX = "rlm-batch-"  # prefix of every name that this package creates at Daytona
ENVIRONMENT_NAMES = ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID", "API_URL", "SERVER_URL", "TARGET")

CLOSE_SECONDS = 5.0

# Creating a client is slow. Each client has a task that closes it when the loop ends.
_clients: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str | None, ...], tuple[daytona.AsyncDaytona, asyncio.Task[None]]]
]
_clients = WeakKeyDictionary()
os.register_at_fork(after_in_child=_clients.clear)  # The child has no threads that run the loops.


def get_client(settings: DaytonaSettings) -> daytona.AsyncDaytona:
    """Return this loop's client for the account. Raise ConfigurationError without credentials for its address."""
    loop = asyncio.get_running_loop()
    key = get_account_key(settings)
    clients = _clients.setdefault(loop, {})
    if key in clients:
        client, _ = clients[key]
        return client
    api_key, api_url, target = key[:3]
    address = api_url or os.environ.get("DAYTONA_API_URL") or os.environ.get("DAYTONA_SERVER_URL") or DEFAULT_API_URL
    if not api_key and address != DEFAULT_API_URL:
        check_key_address(address, "its key for Daytona")
    # Following a log occupies a connection, so a limited pool would block all other calls.
    config = daytona.DaytonaConfig(api_key=api_key, api_url=api_url, target=target, connection_pool_maxsize=None)
    try:
        client = daytona.AsyncDaytona(config)
    except daytona.DaytonaAuthenticationError as error:
        raise ConfigurationError(
            "Daytona needs an API key: set the environment variable DAYTONA_API_KEY, or api_key of a saved block"
        ) from error
    # A separate context, so that the client does not keep its first user's context alive.
    closing = loop.create_task(_close_at_end(client), context=contextvars.Context())
    clients[key] = client, closing
    return client


async def _close_at_end(client: daytona.AsyncDaytona) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await client.close()


@atexit.register
def _close_clients() -> None:
    """Close the clients of event loops that still run in other threads when the process ends."""

    async def close(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for loop, clients in list(_clients.items()):
        if loop.is_running():
            with suppress(Exception):
                closing = close([task for _, task in clients.values()])
                asyncio.run_coroutine_threadsafe(closing, loop).result(CLOSE_SECONDS)


def get_account_key(settings: DaytonaSettings) -> tuple[str | None, ...]:
    """Return key, address and region of an account, and the variables by which the SDK replaces missing ones."""
    values = [settings.reveal_account_setting(name) for name in ("api_key", "api_url", "target")]
    return (*values, *(os.environ.get(f"DAYTONA_{name}") for name in ENVIRONMENT_NAMES))
