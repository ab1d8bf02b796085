"""The sandboxes and volumes of a Daytona account: listing, finding and deleting them, and a shell in one of them."""

import asyncio
import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import daytona

from ...sandbox.cancellation import announce_removal, run_shielded
from ...sandbox.errors import SandboxLost
from ..host_terminal import run_in_terminal
from ..provider import MANAGED_LABELS, SandboxInfo
from ..retry import compute_backoff
from .errors import CALL_SECONDS, get_message, get_state, retry_call, says_gone

DELETE_SECONDS = 60.0  # seconds for which a deletion is retried: Daytona refuses it while the sandbox's state changes
DELETED_VOLUME_STATES = ("pending_delete", "deleting", "deleted")
SHELL_MINUTES = 60  # as long as the sandbox is kept

log = logging.getLogger("rlm_batch.daytona")


async def find_sandbox(
    client: daytona.AsyncDaytona, name: str, looks: int = 1, *, seconds: float = 0.0
) -> daytona.AsyncSandbox | None:
    """Find the sandbox with that name or id. Use several `looks` if a creation call may still be running.

    `seconds` is passed to `retry_call` for each look. Raise DaytonaError.
    """
    for look in range(looks):
        if look:
            await asyncio.sleep(compute_backoff(look - 1, 0.5))
        try:
            return await retry_call(lambda: client.get(name, CALL_SECONDS), seconds=seconds)
        except daytona.DaytonaNotFoundError:
            continue
    return None


async def list_sandboxes(client: daytona.AsyncDaytona, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
    """List the sandboxes with this package's labels and these, except those in deletion. Raise DaytonaError."""
    # The query's `states` would need every state, including those that Daytona adds later.
    query = daytona.ListSandboxesQuery(labels={**MANAGED_LABELS, **(labels or {})})

    async def list_all() -> list[SandboxInfo]:
        found = [item async for item in client.list(query, CALL_SECONDS)]
        return [SandboxInfo(item.id, dict(item.labels)) for item in found if not _is_in_deletion(item)]

    return await retry_call(list_all)


async def find_and_delete_sandbox(client: daytona.AsyncDaytona, sandbox_id: str) -> bool:
    """Delete the sandbox with that id. Return False if it is missing or in deletion. Raise DaytonaError."""
    remote = await find_sandbox(client, sandbox_id, seconds=DELETE_SECONDS)
    if remote is None or _is_in_deletion(remote):
        return False
    await delete_sandbox(remote)
    return True


async def open_shell(client: daytona.AsyncDaytona, sandbox_id: str) -> int:
    """Run `ssh` to a sandbox with an access that Daytona grants for it, and return its exit status.

    Raise SandboxLost or DaytonaError.
    """
    remote = await find_sandbox(client, sandbox_id)
    if remote is None:
        raise SandboxLost(f"the sandbox {sandbox_id} is gone")
    access = await remote.create_ssh_access(SHELL_MINUTES)
    try:
        return await run_in_terminal(shlex.split(access.ssh_command), access.ssh_command.replace(access.token, "TOKEN"))
    finally:
        with suppress(daytona.DaytonaError):
            await run_shielded(remote.revoke_ssh_access(access.token))


async def list_volumes(client: daytona.AsyncDaytona) -> list[str]:
    """Return the names of the volumes that are not being deleted, sorted. Raise DaytonaError."""
    volumes = await retry_call(client.volume.list)
    return sorted(volume.name for volume in volumes if get_state(volume) not in DELETED_VOLUME_STATES)


def _is_in_deletion(remote: daytona.AsyncSandbox) -> bool:
    return get_state(remote) in ("destroying", "destroyed")


async def delete_sandbox(remote: daytona.AsyncSandbox, wait: bool = False) -> None:
    """Delete a sandbox, retrying for `DELETE_SECONDS`. Deleting a missing sandbox is not an error. Raise DaytonaError.

    With `wait`, return only when the sandbox is gone. Until then it counts against the limit of sandboxes.
    """

    async def delete() -> None:
        try:
            await remote.delete(CALL_SECONDS, wait)
        except daytona.DaytonaConflictError:  # The sandbox's state is changing, perhaps because it is being deleted.
            await remote.refresh_data(CALL_SECONDS)
            if wait or not _is_in_deletion(remote):
                raise

    try:
        await retry_call(delete, seconds=DELETE_SECONDS, is_passing=lambda error: not says_gone(error))
    except daytona.DaytonaError as error:
        if not says_gone(error):
            raise


async def delete_leftover(client: daytona.AsyncDaytona, creating: asyncio.Future[Any], name: str, wait: bool) -> None:
    """Delete the sandbox of a creation that failed or was cancelled, as soon as possible."""
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
    """Log that a sandbox, given by id or name, was not removed, and how to remove it."""
    log.warning(
        "sandbox %s could not be removed within %.0f s (%s): run `rlm-batch reap --provider daytona` "
        "later, or wait until Daytona removes it",
        *(sandbox, DELETE_SECONDS, get_message(error)),
    )
