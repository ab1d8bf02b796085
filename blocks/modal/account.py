"""A client that has signed in to Modal, its app and its volumes.

Each is made once for the process: by whoever asks first, and waited for by those who ask meanwhile.
"""

import asyncio
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import modal
from modal.config import config

from ...sandbox.errors import ConfigurationError
from .errors import THROTTLE_SECONDS, get_last_line, map_error
from .settings import ModalSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """A client that has signed in, and its app."""

    client: modal.Client
    app: modal.App


async def open_account(settings: ModalSettings) -> Account:
    """The client and the app. Raises what `open` raises."""
    token = _get_token(settings)

    async def make() -> Account:
        if config.get("max_throttle_wait") is None:
            os.environ["MODAL_MAX_THROTTLE_WAIT"] = str(THROTTLE_SECONDS)
        # It logs every header of every call, the token among them, where a program logs all that there is.
        logging.getLogger("hpack").setLevel(logging.WARNING)
        token_id, secret = (config.get("token_id"), config.get("token_secret")) if None in token else token
        try:
            if token_id and secret:
                client = await modal.Client.from_credentials.aio(token_id, secret)
            else:  # it knows other ways to sign in, and says what is missing; it is one for the whole process
                client = await modal.Client.from_env.aio()
            app = await modal.App.lookup.aio(settings.app_name, create_if_missing=True, client=client)
        except modal.exception.Error as error:
            raise map_error(error, "signing in to Modal failed") from error
        return Account(client, app)

    return await make_once(("account", *get_account_key(settings)), make)


async def get_volume(settings: ModalSettings) -> modal.Volume | None:
    """The volume, of version 2: only there does `sync` commit. Raises what `open` raises."""
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
                f"the volume {name} cannot be used: {get_last_line(error)} Name another with volume_name, or copy its "
                "files to one that is made new"
            ) from error
        except modal.exception.Error as error:
            raise map_error(error, f"the volume {name} could not be had") from error
        return volume

    return await make_once(("volume", *get_account_key(settings), name), make)


def forget_images_and_volumes(settings: ModalSettings) -> None:
    """Drops those of the account, for others may have removed them."""
    account_key = get_account_key(settings)
    for key in list(_made):
        if key[0] != "account" and key[1 : 1 + len(account_key)] == account_key:
            del _made[key]


def get_account_key(settings: ModalSettings) -> tuple[Hashable, ...]:
    """Whose handles they are: Modal's client reads the rest of its configuration from the environment."""
    names = ("SERVER_URL", "TOKEN_ID", "TOKEN_SECRET", "PROFILE", "ENVIRONMENT")
    return (*_get_token(settings), settings.app_name, *(os.environ.get(f"MODAL_{name}") for name in names))


def _get_token(settings: ModalSettings) -> tuple[str | None, ...]:
    token = settings.token_id, settings.token_secret
    return tuple(None if value is None else value.get_secret_value() for value in token)


_made: dict[tuple[Hashable, ...], Any] = {}
_making: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_making = weakref.WeakKeyDictionary()


async def make_once(key: tuple[Hashable, ...], make: Callable[[], Awaitable[T]]) -> T:
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
