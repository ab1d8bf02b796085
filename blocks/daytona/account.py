"""Finding and deleting the sandboxes of a Daytona account."""

import asyncio
import logging
from typing import Any

import daytona

from ...sandbox.cancellation import announce_removal
from .errors import CALL_SECONDS, get_message, get_state, retry_call, says_gone

DELETE_SECONDS = 60.0  # seconds for which a deletion is retried: Daytona refuses it while the sandbox's state changes

log = logging.getLogger("rlm_batch.daytona")


async def find_sandbox(
    client: daytona.AsyncDaytona, name: str, *, seconds: float | None = None
) -> daytona.AsyncSandbox | None:
    """Return the sandbox with that name or id; None if it is missing. Raise DaytonaError.

    `seconds` is the time for retries, as in `retry_call`.
    """
    try:
        return await retry_call(lambda: client.get(name, CALL_SECONDS), seconds=seconds)
    except daytona.DaytonaNotFoundError:
        return None


def is_in_deletion(remote: Any) -> bool:
    """Return True if a sandbox's record says that it is being deleted."""
    return get_state(remote) in ("destroying", "destroyed")


async def delete_sandbox(remote: daytona.AsyncSandbox, wait: bool = False) -> None:
    """Delete a sandbox, retrying for `DELETE_SECONDS`. Deleting a missing sandbox is not an error. Raise DaytonaError.

    With `wait`, return only when the sandbox is gone. Until then it counts against the limit of sandboxes.
    """

    async def delete() -> None:
        try:
            await remote.delete(CALL_SECONDS, wait)
        except daytona.DaytonaConflictError:  # The sandbox is starting, or another call is deleting it.
            await remote.refresh_data(CALL_SECONDS)
            if wait or not is_in_deletion(remote):
                raise

    try:
        await retry_call(delete, seconds=DELETE_SECONDS, is_passing=lambda error: not says_gone(error))
    except daytona.DaytonaError as error:
        if not says_gone(error):
            raise


async def delete_leftover(client: daytona.AsyncDaytona, creating: asyncio.Future[Any], name: str, wait: bool) -> None:
    """Delete the sandbox of a creation that failed or was cancelled, as soon as Daytona has it."""
    pause = 0.05
    try:
        with announce_removal(log):
            while True:
                is_last_look = creating.done()
                remote = await find_sandbox(client, name, seconds=DELETE_SECONDS)
                if remote is not None:
                    await delete_sandbox(remote, wait)
                if remote is not None or is_last_look:
                    break
                await asyncio.wait((creating,), timeout=pause)
                pause = min(2 * pause, 2.0)
    except daytona.DaytonaError as error:
        warn_of_leftover(name, error)
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)


def warn_of_leftover(sandbox: str, error: daytona.DaytonaError) -> None:
    """Log that a sandbox was not removed, and how to remove it. `sandbox` is its id or name."""
    log.warning(
        "sandbox %s could not be removed within %.0f s (%s): run `rlm-batch reap --provider daytona` "
        "later, or wait until Daytona removes it",
        sandbox,
        DELETE_SECONDS,
        get_message(error),
    )
