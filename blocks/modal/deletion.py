"""The deletion of Modal sandboxes: known ones, and those that a lost creation call may have left."""

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


async def terminate_abandoned(creating: asyncio.Future[modal.Sandbox], wait: bool) -> None:
    """Wait for the end of an abandoned creation, and terminate its sandbox."""
    try:
        with announce_removal(log):
            sandbox = await creating
    except RlmBatchError:
        return
    await try_to_terminate(sandbox, wait=wait)


async def find_sandbox(settings: ModalSettings, account: Account, name: str) -> modal.Sandbox | None:
    """Find the sandbox of that name after a creation call without an answer. Return None if none exists."""
    try:
        return await retry_until_done(
            lambda: modal.Sandbox.from_name.aio(settings.app_name, name, client=account.client)
        )
    except modal.exception.NotFoundError:
        return None
    except modal.exception.Error as error:
        log.warning(
            "Modal did not say whether it opened sandbox %s (%s); if it did, it ends after %s s at most",
            *(name, get_last_line(error), settings.idle_timeout),
        )
        return None
