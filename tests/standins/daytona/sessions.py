"""Sequential commands of a session, each with a complete log."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

CHUNK = 64 * 1024  # bytes


class Command:
    """A command of a session: a process and its complete log."""

    def __init__(self, text: str) -> None:
        self.id = str(uuid.uuid4())
        self.text = text
        self.log = bytearray()
        self.exit_code: int | None = None
        self.gone = False  # its sandbox was removed
        self.ended_at = 0.0
        self.input: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.log += data
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, code: int) -> None:
        self.exit_code, self.ended_at = code, time.monotonic()
        self.add(b"")

    async def change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def read(self, stream: asyncio.StreamReader, label: bytes) -> None:
        """Copy a stream into the log line by line, without NULs, like a shell that reads it."""
        rest: list[bytes] = []
        while data := await stream.read(CHUNK):
            head, newline, tail = data.replace(b"\0", b"").rpartition(b"\n")
            if newline:
                lines = b"".join((*rest, head)).split(b"\n")
                self.add(b"".join(label + line + b"\n" for line in lines))
                rest = [tail] if tail else []
            else:
                rest.append(tail)
        if rest:
            self.add(label + b"".join(rest) + b"\n")


class Session:
    """A shell that runs commands sequentially."""

    def __init__(self) -> None:
        self.commands: dict[str, Command] = {}
        self.queue: asyncio.Queue[Command] = asyncio.Queue()
        self.runner: asyncio.Task[None] | None = None
