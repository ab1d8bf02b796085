"""A signed-in client of Modal, its app and its volumes.

Each is created once per process. Concurrent callers wait until the first caller has created it.
"""

import asyncio
import logging
import math
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import modal
from grpclib.exceptions import StreamTerminatedError
from modal.config import config

from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError, SandboxStartError
from .errors import THROTTLE_SECONDS, get_last_line, map_error
from .settings import ModalSettings

T = TypeVar("T")

# Names in Modal's configuration, where each has the prefix oauth_.
OAUTH_NAMES = ("refresh_token", "client_id", "client_secret", "jwt_key")
ENVIRONMENT_NAMES = (
    *("SERVER_URL", "TOKEN_ID", "TOKEN_SECRET", "PROFILE", "ENVIRONMENT"),
    *(f"OAUTH_{name.upper()}" for name in OAUTH_NAMES),
)
SIGN_IN_SECONDS = 10.0  # seconds for Modal to answer. Its client would retry for a minute, or wait for ever.
THROTTLE_NOTICE_SECONDS = 300.0  # seconds between two log lines about throttled calls


@dataclass(frozen=True)
class Account:
    """A signed-in client and its app."""

    client: modal.Client
    app: modal.App


async def open_account(settings: ModalSettings) -> Account:
    """Return the client and the app. Raise the errors of `SandboxProvider.open`."""
    token = _get_token(settings)

    async def make() -> Account:
        if config.get("max_throttle_wait") is None:
            os.environ["MODAL_MAX_THROTTLE_WAIT"] = str(THROTTLE_SECONDS)
        # At DEBUG level, hpack logs all headers of every call, including the token.
        logging.getLogger("hpack").setLevel(logging.WARNING)
        logging.getLogger("modal-utils").addFilter(_is_worth_a_line)  # Adding the filter again has no effect.
        token_id, secret = (config.get("token_id"), config.get("token_secret")) if None in token else token
        refresh_token, client_id, client_secret, jwt_key = (config.get(f"oauth_{name}") for name in OAUTH_NAMES)
        try:
            async with asyncio.timeout(SIGN_IN_SECONDS):
                if token_id and secret:
                    client = await modal.Client.from_credentials.aio(token_id, secret)
                elif refresh_token and client_id:
                    client = await modal.Client.from_oauth_credentials.aio(
                        refresh_token,
                        oauth_client_id=client_id,
                        oauth_client_secret=client_secret,
                        oauth_jwt_key=jwt_key,
                    )
                else:  # This raises an error that says what is missing.
                    client = await modal.Client.from_env.aio()
                await client.hello.aio()
            app = await modal.App.lookup.aio(settings.app_name, create_if_missing=True, client=client)
        except (TimeoutError, StreamTerminatedError) as error:
            reason = f"did not answer within {SIGN_IN_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
            raise SandboxStartError(
                f"signing in to Modal failed: {config.get('server_url')} {reason}. Check this machine's "
                "network, and MODAL_SERVER_URL if it is set"
            ) from error
        except modal.exception.Error as error:
            raise map_error(error, "signing in to Modal failed") from error
        return Account(client, app)

    return await make_once(("account", *get_account_key(settings)), make)


async def get_volume(settings: ModalSettings) -> modal.Volume | None:
    """Return the volume. Only in version 2 does `sync` commit. Raise the errors of `SandboxProvider.open`."""
    name = settings.volume_name
    if name is None:
        return None

    async def make() -> modal.Volume:
        account = await open_account(settings)
        volume = modal.Volume.from_name(name, create_if_missing=True, version=2, client=account.client)
        try:
            await volume.hydrate.aio()
        except modal.exception.InvalidError as error:
            raise ConfigurationError(
                f"the volume {name!r} cannot be used: {get_last_line(error)} Set "
                f"{name_parameter('volume_name')} to another"
            ) from error
        except modal.exception.Error as error:
            raise map_error(error, f"the volume {name!r} could not be opened") from error
        return volume

    return await make_once(("volume", *get_account_key(settings), name), make)


def forget_images_and_volumes(settings: ModalSettings) -> None:
    """Forget the account's images and volumes, because they may have been deleted."""
    account_key = get_account_key(settings)
    for key in list(_made):
        if key[0] != "account" and key[1 : 1 + len(account_key)] == account_key:
            del _made[key]


def get_account_key(settings: ModalSettings) -> tuple[Hashable, ...]:
    """Return the key of an account's handles. It includes the environment variables that Modal's client reads."""
    environment = (os.environ.get(f"MODAL_{name}") for name in ENVIRONMENT_NAMES)
    return (*_get_token(settings), settings.app_name, *environment)


def _get_token(settings: ModalSettings) -> tuple[str | None, ...]:
    token = settings.get_account_setting("token_id"), settings.get_account_setting("token_secret")
    return tuple(None if value is None else value.get_secret_value() for value in token)


_made: dict[tuple[Hashable, ...], Any] = {}
_making: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_making = weakref.WeakKeyDictionary()


async def make_once(key: tuple[Hashable, ...], make: Callable[[], Awaitable[T]]) -> T:
    """Return what `make` creates, once per key. Concurrent callers wait for it and can be cancelled separately."""
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
        # Mark the exception as retrieved, because all callers may have been cancelled.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


_told_of_throttling_at = -math.inf


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for most of the client's lines about throttled calls, which it logs for each retry."""
    global _told_of_throttling_at
    text = record.getMessage()
    if "Retrying..." not in text or "Received" not in text:
        return True
    now = time.monotonic()
    if now < _told_of_throttling_at + THROTTLE_NOTICE_SECONDS:
        return False
    _told_of_throttling_at = now
    reason = " ".join(text.removeprefix("Warning: Received ").partition(f"{os.linesep}for ")[0].split())
    record.msg = (
        f"Modal throttles calls, and they are retried: lower {name_parameter('max_workers')} if this "
        f"continues ({reason})"
    )
    record.args = ()
    return True
