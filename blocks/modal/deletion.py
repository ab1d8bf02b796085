"""How a sandbox of Modal is ended: one that is known, and one that a lost creation may have left."""

import asyncio
import logging
from contextlib import suppress

import modal

from ...sandbox.cancellation import announce_removal
from ...sandbox.errors import RlmBatchError
from .account import Account
from .errors import get_last_line, retry_until_done
from .settings import ModalSettings

log = logging.getLogger("rlm_batch.modal")


async def terminate_sandbox(sandbox: modal.Sandbox, *, wait: bool = False) -> None:
    """Terminates it and lets go of the connection; that it has ended already is success. Raises the client's errors.

    With `wait` it returns when the sandbox has ended, for until then it counts.
    """
    try:
        await retry_until_done(lambda: sandbox.terminate.aio(wait=True) if wait else sandbox.terminate.aio())
    except modal.exception.NotFoundError:
        return
    finally:
        with suppress(Exception):
            await sandbox.detach.aio()  # otherwise its socket stays for half a minute


async def try_to_terminate(sandbox: modal.Sandbox, *, wait: bool) -> None:
    """The same, raising nothing: what Modal does not do now, it does at the end of the sandbox's lifetime."""
    try:
        await terminate_sandbox(sandbox, wait=wait)
    except modal.exception.Error as error:
        log.warning("sandbox %s was not removed: %s", sandbox.object_id, get_last_line(error))


async def terminate_abandoned(creating: asyncio.Future[modal.Sandbox], wait: bool) -> None:
    """Waits for a creation that nobody wants any more, and ends what it made."""
    try:
        with announce_removal(log):
            sandbox = await creating
    except RlmBatchError:
        return
    await try_to_terminate(sandbox, wait=wait)


async def find_sandbox(settings: ModalSettings, account: Account, name: str) -> modal.Sandbox | None:
    """The sandbox of that name, which may be there although the answer to its creation did not come; else None."""
    try:
        return await retry_until_done(
            lambda: modal.Sandbox.from_name.aio(settings.app_name, name, client=account.client)
        )
    except modal.exception.NotFoundError:
        return None
    except modal.exception.Error as error:
        log.warning(
            "Modal did not say whether it opened sandbox %s (%s); if it did, it ends it after %s s at most",
            *(name, get_last_line(error), settings.idle_timeout),
        )
        return None
