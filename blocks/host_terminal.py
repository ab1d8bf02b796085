"""The terminal of this process while it shows a shell in a sandbox: raw mode, typed bytes, and changes of its size."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

READ_BYTES = 65536
INPUTS_HINT = "python3 -i .rlm-batch/inputs.py starts Python with the execution's variables"

# A program for `sh -c`. Its arguments are the working directory, and a line to print first.
START_SHELL = """
cd -- "$1" || exit
printf '%s\\n' "$2"
command -v bash >/dev/null && exec bash
exec sh
"""


def build_shell_command(directory: str) -> list[str]:
    """Return the command of a shell in this directory of a sandbox."""
    return ["sh", "-c", START_SHELL, "shell", directory, f"In {directory}. {INPUTS_HINT}. Ctrl-D ends the shell."]


def get_terminal_size() -> tuple[int, int]:
    """Return the rows and columns of this process's terminal."""
    size = os.get_terminal_size(sys.stdin.fileno())
    return size.lines or 24, size.columns or 80


@asynccontextmanager
async def relay_terminal(
    send: Callable[[bytes], Awaitable[object]], resize: Callable[[int, int], Awaitable[object]]
) -> AsyncIterator[Callable[[bytes], None]]:
    """Put the terminal into raw mode and yield a function that writes to it.

    Args:
        send: Takes the typed bytes. Ctrl-C and Ctrl-D are bytes like others.
        resize: Takes the rows and columns after each change of the terminal's size.
    """
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    events = asyncio.Queue[bytes | None]()  # None after a change of the size

    def read() -> None:
        data = b""
        with suppress(OSError):
            data = os.read(terminal, READ_BYTES)
        if data:
            events.put_nowait(data)
        else:
            loop.remove_reader(terminal)

    async def pass_events() -> None:
        while True:
            data = await events.get()
            await (resize(*get_terminal_size()) if data is None else send(data))

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]

    attributes = termios.tcgetattr(terminal)
    passing = asyncio.create_task(pass_events())
    loop.add_signal_handler(signal.SIGWINCH, events.put_nowait, None)
    loop.add_reader(terminal, read)
    try:
        tty.setraw(terminal)
        yield write
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
        loop.remove_reader(terminal)
        loop.remove_signal_handler(signal.SIGWINCH)
        passing.cancel()
        await asyncio.wait([passing])
    if not passing.cancelled() and (error := passing.exception()) is not None:
        raise error
