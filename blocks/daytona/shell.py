"""A shell in a kept sandbox of Daytona, in the terminal of this process."""

import asyncio
import os
import shlex
import uuid
from contextlib import suppress

import daytona
from daytona.common.pty import PtySize
from daytona.handle.async_pty_handle import AsyncPtyHandle

from ...sandbox.cancellation import run_shielded
from ..host_terminal import INPUTS_HINT, get_terminal_size, relay_terminal
from .settings import DaytonaSettings
from .setup import name_clone


async def open_shell(settings: DaytonaSettings, remote: daytona.AsyncSandbox) -> int:
    """Run a shell in a pseudo-terminal of Daytona's, and return its exit status. Raise DaytonaError."""
    handle: asyncio.Future[AsyncPtyHandle] = asyncio.get_running_loop().create_future()

    async def send(data: bytes) -> None:
        with suppress(daytona.DaytonaError):  # The shell has ended.
            await (await handle).send_input(data)

    async def resize(rows: int, columns: int) -> None:
        with suppress(daytona.DaytonaError):
            await (await handle).resize(PtySize(rows=rows, cols=columns))

    environment = {name: value.get_secret_value() for name, value in settings.environment.items()}
    session, (rows, columns) = f"rlm-batch-{uuid.uuid4().hex[:12]}", get_terminal_size()

    async def end() -> None:
        with suppress(daytona.DaytonaError):
            await remote.process.kill_pty_session(session)

    async with relay_terminal(send, resize) as write:
        write(f"{INPUTS_HINT}. Ctrl-D ends the shell.\r\n".encode())
        try:
            shell = await remote.process.create_pty_session(
                session,
                write,
                envs={"TERM": os.environ.get("TERM", "dumb"), **environment},
                pty_size=PtySize(rows=rows, cols=columns),
            )
            handle.set_result(shell)
            try:
                if settings.repo_url is not None:
                    await shell.send_input(f" cd {shlex.quote(name_clone(settings))}\n")
                result = await shell.wait()
            finally:
                await shell.disconnect()
        except BaseException:
            await run_shielded(end())
            raise
    if result.exit_code is None:
        raise daytona.DaytonaError(f"the terminal was lost: {result.error or 'its connection ended'}")
    return result.exit_code
