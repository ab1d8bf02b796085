"""How a sandbox of Daytona is deleted: one that is known, and one that a lost creation may have left."""

import asyncio
import logging
from typing import Any

import daytona

from ...sandbox.cancellation import announce_removal
from .client import SharedClient
from .errors import CALL_SECONDS, get_message, retry_call, says_gone

DELETE_SECONDS = 60.0  # for which a removal is tried: Daytona removes none whose state is just changing

log = logging.getLogger("rlm_batch.daytona")


async def find_sandbox(
    client: SharedClient, name: str, looks: int = 1, *, tries: int | None = None, seconds: float = 0.0
) -> daytona.AsyncSandbox | None:
    """The sandbox of that name or id, looked for several times where a call that creates it may be under way.

    `tries` and `seconds` are those of `retry_call`, for each look. Raises DaytonaError.
    """
    for look in range(looks):
        if look:
            await asyncio.sleep(0.5 * 2 ** (look - 1))
        try:
            return await retry_call(lambda: client.sdk.get(name, CALL_SECONDS), tries, seconds=seconds)
        except daytona.DaytonaNotFoundError:
            continue
    return None


async def delete_sandbox(remote: daytona.AsyncSandbox, wait: bool = False) -> None:
    """Deletes it, and tries to for a minute; with `wait`, returns when it has gone, for until then it counts.

    That it has gone already is success. Raises DaytonaError.
    """

    async def delete() -> None:
        try:
            await remote.delete(CALL_SECONDS, wait)
        except daytona.DaytonaConflictError:  # its state is just changing: it may be on its way out
            await remote.refresh_data(CALL_SECONDS)
            if wait or remote.state not in (daytona.SandboxState.DESTROYING, daytona.SandboxState.DESTROYED):
                raise

    try:
        await retry_call(delete, seconds=DELETE_SECONDS, is_passing=lambda error: not says_gone(error))
    except daytona.DaytonaError as error:
        if not says_gone(error):
            raise


async def delete_leftover(client: SharedClient, creating: asyncio.Future[Any], name: str, wait: bool) -> None:
    """Deletes the sandbox of a creation that failed, or that nobody waits for any more, as soon as that can be done."""
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
    await asyncio.wait((creating,))
    if not creating.cancelled():
        creating.exception()


def warn_of_leftover(sandbox: str, error: daytona.DaytonaError) -> None:
    """Says in the log that a sandbox, by its id or name, is left, and what will remove it."""
    log.warning(
        "sandbox %s could not be removed within %.0f s (%s): Daytona removes it when it was idle or at the end of its "
        "lifetime, `rlm-batch reap --provider daytona` when it can be",
        *(sandbox, DELETE_SECONDS, get_message(error)),
    )
