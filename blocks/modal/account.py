"""The account at Modal. Its client, app and volumes are made once per process."""

import asyncio
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import modal
from grpclib.exceptions import StreamTerminatedError
from modal.config import config

from ...sandbox.errors import SandboxStartError
from ..worker_consent import check_key_address
from .errors import THROTTLE_SECONDS, convert_errors, get_last_line, retry_until_done
from .settings import TOKEN_SETTINGS, ModalSettings

T = TypeVar("T")

ENVIRONMENT_NAMES = ("SERVER_URL", "TOKEN_ID", "TOKEN_SECRET", "PROFILE", "ENVIRONMENT")
OWN_SERVERS = ("https://api.modal.com", "https://api.modal2.com")  # Modal's own
SIGN_IN_SECONDS = 10.0  # seconds for Modal to answer. Its client would retry for a minute, or wait for ever.

log = logging.getLogger("rlm_batch.modal")


@dataclass(frozen=True)
class Account:
    """A signed-in client and its app."""

    client: modal.Client
    app: modal.App


async def open_account(settings: ModalSettings) -> Account:
    """Return the client and the app. Raise the errors of `SandboxProvider.open`."""

    async def make() -> Account:
        if config.get("max_throttle_wait") is None:
            os.environ["MODAL_MAX_THROTTLE_WAIT"] = str(THROTTLE_SECONDS)
        # At DEBUG level, hpack logs all headers of every call, including the token.
        logging.getLogger("hpack").setLevel(logging.WARNING)
        try:
            with convert_errors("signing in to Modal failed"):
                async with asyncio.timeout(SIGN_IN_SECONDS):
                    client = await _sign_in(settings)
                    await client.hello.aio()
                app = await modal.App.lookup.aio(settings.app_name, create_if_missing=True, client=client)
        except (TimeoutError, StreamTerminatedError) as error:
            raise SandboxStartError(
                f"signing in to Modal failed: {config.get('server_url')} did not answer within {SIGN_IN_SECONDS:g} s. "
                "Check this machine's network, and MODAL_SERVER_URL if it is set"
            ) from error
        return Account(client, app)

    return await make_once(settings, ("account",), make)


async def _sign_in(settings: ModalSettings) -> modal.Client:
    """Sign in with the settings' token, or else with Modal's own configuration."""
    token_id, token_secret = [settings.reveal_account_setting(name) for name in TOKEN_SETTINGS]
    if not token_id or not token_secret:
        for url in config.get("server_url").split(","):
            if url not in OWN_SERVERS:
                check_key_address(url, "its token for Modal")
        token_id, token_secret = config.get("token_id"), config.get("token_secret")
    if token_id and token_secret:
        return await modal.Client.from_credentials.aio(token_id, token_secret)
    # This signs in with OAuth, or raises an error that says what is missing.
    return await modal.Client.from_env.aio()


async def get_volume(settings: ModalSettings) -> modal.Volume | None:
    """Return the volume, created if it is missing; None without `volume_name`.

    Raise the errors of `SandboxProvider.open`.
    """
    name = settings.volume_name
    if name is None:
        return None

    async def make() -> modal.Volume:
        account = await open_account(settings)
        # In version 1, the program `sync` commits nothing.
        volume = modal.Volume.from_name(name, create_if_missing=True, version=2, client=account.client)
        with convert_errors(f"`volume_name` {name!r} cannot be used"):
            await volume.hydrate.aio()
        return volume

    return await make_once(settings, ("volume", name), make)


async def terminate_sandbox(sandbox: modal.Sandbox, *, wait: bool = False) -> None:
    """Terminate a sandbox and close its connection. Terminating an ended sandbox is not an error.

    With `wait`, return only when the sandbox has ended. Until then it counts against the limit of sandboxes. Raise the
    client's errors.
    """
    try:
        await retry_until_done(lambda: sandbox.terminate.aio(wait=True) if wait else sandbox.terminate.aio())
    except modal.exception.NotFoundError:
        return
    finally:
        with suppress(Exception):
            await sandbox.detach.aio()  # Without `detach` its socket stays open for half a minute.


async def try_to_terminate(sandbox: modal.Sandbox, *, wait: bool) -> None:
    """Terminate a sandbox, but log errors instead of raising them. Modal ends the sandbox at its lifetime anyway."""
    try:
        await terminate_sandbox(sandbox, wait=wait)
    except modal.exception.Error as error:
        log.warning("sandbox %s was not removed: %s", sandbox.object_id, get_last_line(error))


_made: dict[tuple[Hashable, ...], Any] = {}
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[Hashable, asyncio.Lock]]
_locks = weakref.WeakKeyDictionary()


async def make_once(settings: ModalSettings, name: tuple[Hashable, ...], make: Callable[[], Awaitable[T]]) -> T:
    """Return the object of that name in the account. The first call makes it, and concurrent calls wait for it."""
    # Modal's client reads these environment variables.
    environment = [os.environ.get(f"MODAL_{variable}") for variable in ENVIRONMENT_NAMES]
    token = [settings.reveal_account_setting(setting) for setting in TOKEN_SETTINGS]
    key = (*token, settings.app_name, *environment, *name)
    locks = _locks.setdefault(asyncio.get_running_loop(), defaultdict(asyncio.Lock))
    async with locks[key]:
        if key not in _made:
            _made[key] = await make()
        return _made[key]
