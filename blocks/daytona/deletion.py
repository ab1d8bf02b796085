"""How a sandbox of Daytona is deleted: one that is known, and one that a lost creation may have left."""

import asyncio
import logging
from typing import Any

import daytona

from .client import SharedClient
from .errors import CALL_SECONDS, get_message, is_transient, retry_call

log = logging.getLogger("rlm_batch.daytona")


async def find_sandbox(
    client: SharedClient, name: str, looks: int = 1, tries: int | None = None
) -> daytona.AsyncSandbox | None:
    """The sandbox of that name or id, looked for several times where a call that creates it may be under way."""
    for look in range(looks):
        if look:
            await asyncio.sleep(0.5 * 2 ** (look - 1))
        try:
            return await retry_call(lambda: client.sdk.get(name, CALL_SECONDS), tries)
        except daytona.DaytonaNotFoundError:
            continue
    return None


async def delete_sandbox(remote: daytona.AsyncSandbox, wait: bool = False) -> None:
    """Deletes it; with `wait`, returns when it has gone, for until then it counts at the provider.

    That it has gone already is success. Raises DaytonaError.
    """

    def is_passing(error: Exception) -> bool:
        # A conflict: its state is just changing, and it cannot be removed meanwhile.
        return is_transient(error) or isinstance(error, daytona.DaytonaConflictError)

    try:
        await retry_call(lambda: remote.delete(CALL_SECONDS, wait), is_passing=is_passing)
    except daytona.DaytonaNotFoundError:
        return


async def delete_leftover(client: SharedClient, creating: asyncio.Future[Any], name: str, wait: bool) -> None:
    """Deletes the sandbox of a creation that failed, or that nobody waits for any more, as soon as it can be seen."""
    pause = 0.05
    try:
        while True:
            is_last_look = creating.done()
            remote = await find_sandbox(client, name)
            if remote is not None:
                await delete_sandbox(remote, wait)
            if remote is not None or is_last_look:
                break
            await asyncio.wait((creating,), timeout=pause)
            pause = min(2 * pause, 2.0)
    except daytona.DaytonaError as error:
        log.warning("sandbox %s could not be removed, and ends with its lifetime: %s", name, get_message(error))
    creating.cancel()
    await asyncio.wait((creating,))
    if not creating.cancelled():
        creating.exception()
