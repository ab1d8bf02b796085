"""A shell in a kept sandbox of Modal, in the terminal of this process."""

import asyncio
from contextlib import suppress
from typing import Any

import modal

from ...sandbox.cancellation import run_shielded
from ..host_terminal import ShellNote, build_shell_command, relay_terminal
from .settings import ModalSettings


async def open_shell(settings: ModalSettings, sandbox: modal.Sandbox) -> int:
    """Run a shell in a pseudo-terminal of Modal's, and return its exit status. Raise Modal's errors.

    A command of Modal's ends only with its sandbox, and its pseudo-terminal keeps its size. So each change of the size
    starts another program, and so does a cancellation, which ends the shell.
    """
    note = ShellNote()
    environment: dict[str, str | None] = {
        name: value.get_secret_value() for name, value in settings.environment.items()
    }
    shell = build_shell_command(settings.workdir, note.path)
    process: Any = await sandbox.exec.aio(*shell, text=False, pty=True, env=environment)

    async def run(command: list[str]) -> None:
        with suppress(modal.exception.Error):
            program: Any = await sandbox.exec.aio(*command, text=False)
            await program.wait.aio()

    async def send(data: bytes) -> None:
        with suppress(modal.exception.Error):  # The shell has ended.
            process.stdin.write(data)
            await process.stdin.drain.aio()

    async def resize(rows: int, columns: int) -> None:
        await run(note.build_resize_command(rows, columns))

    async with relay_terminal(send, resize) as write:
        try:
            async for data in process.stdout:
                write(data)
            return await process.wait.aio()
        except BaseException:
            await run_shielded(run(note.end_command))
            raise
        finally:
            with suppress(Exception):
                await asyncio.shield(sandbox.detach.aio())
