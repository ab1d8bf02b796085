"""A shell in a kept sandbox of Daytona: `ssh` with an access that Daytona grants for it."""

import shlex
from contextlib import suppress

import daytona

from ...sandbox.cancellation import run_shielded
from ..host_terminal import run_in_terminal

ACCESS_MINUTES = 60  # as long as the sandbox is kept


async def open_shell(remote: daytona.AsyncSandbox) -> int:
    """Run `ssh` to a sandbox, and return its exit status. Raise DaytonaError."""
    access = await remote.create_ssh_access(ACCESS_MINUTES)
    try:
        return await run_in_terminal(shlex.split(access.ssh_command), access.ssh_command.replace(access.token, "TOKEN"))
    finally:
        with suppress(daytona.DaytonaError):
            await run_shielded(remote.revoke_ssh_access(access.token))
