"""A command on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import termios
from typing import Any

from .sandboxes import die_with_parent

Terminal = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def start_on_terminal(
    words: list[str], info: Any, options: dict[str, Any]
) -> tuple[asyncio.subprocess.Process, Terminal]:
    """Start a command on a new pseudo-terminal of the size in `info`; return it with our end of the terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", info.winsz_rows, info.winsz_cols, 0, 0))

    def enter() -> None:
        die_with_parent()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=its, stdout=its, stderr=its, preexec_fn=enter, **options
        )
    finally:
        os.close(its)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(ours), "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours, "wb", 0))
    return process, (reader, asyncio.StreamWriter(transport, protocol, None, loop))
