"""A shell in a sandbox, in the terminal of this process: a command that takes the terminal until it ends."""

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..sandbox.cancellation import run_shielded

# Code may have written files that a shell reads at its start, and the walls may close the system's.
SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash --norc; exec sh")
HINT = "python3 -i .rlm-batch/inputs.py starts Python with the execution's variables. Ctrl-D ends the shell."
SIGNAL_STATUS = 128  # added to a signal's number in a shell's status


async def run_in_terminal(
    command: Sequence[str],
    shown: str,
    *,
    environment: Mapping[str, str] | None = None,
    on_start: Callable[[int], Awaitable[None]] | None = None,
    **options: Any,
) -> int:
    """Run a command in this process's terminal, and return its exit status. Cancelling this call kills it.

    `shown` is a line to print first, as the command may contain a secret. `on_start` is awaited with the process id.
    """
    terminal = sys.stdin.fileno()
    settings, group = termios.tcgetattr(terminal), os.getpgrp()
    print(f"{shown}\n{HINT}", flush=True)
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **(environment or {})}, **options)
    try:
        if on_start is not None:
            await on_start(process.pid)
        status = await process.wait()
        return status if status >= 0 else SIGNAL_STATUS - status
    finally:
        with suppress(ProcessLookupError):  # The command has ended.
            process.kill()
        await run_shielded(process.wait())
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # A killed shell may leave its group in the foreground.
        with suppress(OSError, termios.error):  # The terminal was closed.
            os.tcsetpgrp(terminal, group)
            termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
        signal.signal(signal.SIGTTOU, before)
