"""The terminal of this process while it shows a shell in a sandbox: raw mode, typed bytes, and changes of its size."""

import asyncio
import os
import signal
import sys
import termios
import tty
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

READ_BYTES = 65536
INPUTS_HINT = "python3 -i .rlm-batch/inputs.py starts Python with the execution's variables"

# A program for `sh -c`. Its arguments are the working directory, a line to print first, and a file for `ShellNote`.
# The walls may refuse Debian's /etc/bash.bashrc, and then bash would complain.
START_SHELL = """
[ -z "$3" ] || { echo $$; tty; } >"$3" 2>/dev/null
cd -- "$1" || exit
printf '%s\\n' "$2"
command -v bash >/dev/null || exec sh
[ -e /etc/bash.bashrc ] && ! (: </etc/bash.bashrc) 2>/dev/null && exec bash --norc
exec bash
"""
# The shell's programs get SIGHUP from it.
END_SHELL = 'read -r pid <"$1" && kill -HUP "$pid"'
SET_SIZE = '{ read -r pid; read -r terminal; } <"$1" && stty rows "$2" cols "$3" <"$terminal"'


def build_shell_command(directory: str, note: str = "") -> list[str]:
    """Return the command of a shell in this directory of a sandbox; see `ShellNote` for the path `note`."""
    line = f"In {directory}. {INPUTS_HINT}. Ctrl-D ends the shell."
    return ["sh", "-c", START_SHELL, "shell", directory, line, note]


class ShellNote:
    """A file in the sandbox with a shell's process id and terminal, for providers that cannot signal or resize it."""

    def __init__(self) -> None:
        self.path = f"/tmp/.rlm-batch-shell-{uuid.uuid4().hex[:12]}"

    @property
    def end_command(self) -> list[str]:
        """The command that ends the shell."""
        return ["sh", "-c", END_SHELL, "end", self.path]

    def build_resize_command(self, rows: int, columns: int) -> list[str]:
        """Return the command that sets the size of the shell's terminal."""
        return ["sh", "-c", SET_SIZE, "resize", self.path, str(rows), str(columns)]


def get_terminal_size() -> tuple[int, int]:
    """Return the rows and columns of this process's terminal."""
    size = os.get_terminal_size(sys.stdin.fileno())
    return size.lines or 24, size.columns or 80


@contextmanager
def restore_terminal() -> Iterator[None]:
    """Give this process's terminal its present settings back at the end of the block."""
    terminal = sys.stdin.fileno()
    attributes = termios.tcgetattr(terminal)
    try:
        yield
    finally:
        with suppress(termios.error):  # The terminal was closed.
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)


@asynccontextmanager
async def relay_terminal(
    send: Callable[[bytes], Awaitable[object]], resize: Callable[[int, int], Awaitable[object]]
) -> AsyncIterator[Callable[[bytes], None]]:
    """Put the terminal into raw mode and yield a function that writes to it.

    The end of the terminal cancels the calling task.

    Args:
        send: Takes the typed bytes. Ctrl-C and Ctrl-D are bytes like others.
        resize: Takes the rows and columns after each change of the terminal's size.
    """
    terminal, loop, task = sys.stdin.fileno(), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    events = asyncio.Queue[bytes | None]()  # None after a change of the size

    def read() -> None:
        data = b""
        with suppress(OSError):
            data = os.read(terminal, READ_BYTES)
        if data:
            events.put_nowait(data)
        else:
            loop.remove_reader(terminal)
            task.cancel()

    async def pass_events() -> None:
        while True:
            data = await events.get()
            await (resize(*get_terminal_size()) if data is None else send(data))

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]

    with restore_terminal():
        passing = asyncio.create_task(pass_events())
        loop.add_signal_handler(signal.SIGWINCH, events.put_nowait, None)
        loop.add_reader(terminal, read)
        try:
            tty.setraw(terminal)
            yield write
        finally:
            loop.remove_reader(terminal)
            loop.remove_signal_handler(signal.SIGWINCH)
            passing.cancel()
            await asyncio.wait([passing])
    if not passing.cancelled() and (error := passing.exception()) is not None:
        raise error
