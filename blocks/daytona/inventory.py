"""The account's sandboxes: found by name or id, and deleted so that none is left."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from .calls import CALL_SECONDS, retry_call
from .client import SharedClient
from .errors import get_message, is_transient
from .sdk import get_sdk

if TYPE_CHECKING:
    from daytona import AsyncSandbox

log = logging.getLogger("rlm_batch.daytona")


async def find_sandbox(
    client: SharedClient, name: str, looks: int = 1, tries: int | None = None
) -> AsyncSandbox | None:
    """The sandbox of that name or id, looked for several times where a call that creates it may be under way."""
    for look in range(looks):
        if look:
            await asyncio.sleep(0.5 * 2 ** (look - 1))
        try:
            return await retry_call(lambda: client.sdk.get(name, CALL_SECONDS), tries)
        except get_sdk().DaytonaNotFoundError:
            continue
    return None


async def delete_sandbox(remote: AsyncSandbox, wait: bool = False) -> None:
    """Deletes it; with `wait`, returns when it has gone, for until then it counts at the provider.

    That it has gone already is success. Raises DaytonaError.
    """

    def is_passing(error: Exception) -> bool:
        # A conflict: its state is just changing, and it cannot be removed meanwhile.
        return is_transient(error) or isinstance(error, get_sdk().DaytonaConflictError)

    try:
        await retry_call(lambda: remote.delete(CALL_SECONDS, wait), is_passing=is_passing)
    except get_sdk().DaytonaNotFoundError:
        return


async def delete_named(client: SharedClient, name: str, looks: int, wait: bool) -> None:
    """Deletes what a failed creation may have left; what cannot be deleted now goes when its lifetime ends."""
    await _try_to_delete(client, name, looks, wait)


async def delete_abandoned(client: SharedClient, creating: asyncio.Future[AsyncSandbox], name: str, wait: bool) -> None:
    """Deletes the sandbox of a creation that nobody waits for any more, as soon as it can be seen."""
    pause = 0.05
    while True:
        is_last_look = creating.done()
        if await _try_to_delete(client, name, 1, wait) or is_last_look:
            break
        await asyncio.wait((creating,), timeout=pause)
        pause = min(2 * pause, 2.0)
    creating.cancel()
    await asyncio.wait((creating,))
    if not creating.cancelled():
        creating.exception()


async def _try_to_delete(client: SharedClient, name: str, looks: int, wait: bool) -> bool:
    """Deletes the sandbox of that name, if one is found; returns whether there is no more to do."""
    try:
        remote = await find_sandbox(client, name, looks)
        if remote is not None:
            await delete_sandbox(remote, wait)
        return remote is not None
    except get_sdk().DaytonaError as error:
        log.warning("sandbox %s could not be removed, and ends with its lifetime: %s", name, get_message(error))
        return True
