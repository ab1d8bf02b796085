"""A shell in a kept sandbox of Modal, in the terminal of this process."""

import asyncio
from contextlib import suppress
from typing import Any

import modal

from ..host_terminal import build_shell_command, relay_terminal
from .settings import ModalSettings

# Modal's pseudo-terminals have the size of their start. The shell's first program notes the terminal's path, and each
# change of the size starts another program, which sets the size there.
NOTE_TERMINAL = 'tty >/tmp/.rlm-batch-terminal; exec "$@"'
SET_SIZE = 'stty rows "$1" cols "$2" <"$(cat /tmp/.rlm-batch-terminal)"'


async def open_shell(settings: ModalSettings, sandbox: modal.Sandbox) -> int:
    """Run a shell in a pseudo-terminal of Modal's, and return its exit status. Raise Modal's errors."""
    environment: dict[str, str | None] = {
        name: value.get_secret_value() for name, value in settings.environment.items()
    }
    shell = build_shell_command(settings.workdir)
    process: Any = await sandbox.exec.aio(
        "sh", "-c", NOTE_TERMINAL, "shell", *shell, text=False, pty=True, env=environment
    )

    async def send(data: bytes) -> None:
        with suppress(modal.exception.Error):  # The shell has ended.
            process.stdin.write(data)
            await process.stdin.drain.aio()

    async def resize(rows: int, columns: int) -> None:
        with suppress(modal.exception.Error):
            resizing: Any = await sandbox.exec.aio("sh", "-c", SET_SIZE, "resize", str(rows), str(columns), text=False)
            await resizing.wait.aio()

    async with relay_terminal(send, resize) as write:
        try:
            async for data in process.stdout:
                write(data)
            return await process.wait.aio()
        finally:
            with suppress(Exception):
                await asyncio.shield(sandbox.detach.aio())
