"""Sandboxes and their commands: real processes, whose output can be read from any offset."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

from modal_proto import api_pb2

from .volumes import Mount

Result = api_pb2.GenericResult
PIECE = 256 * 1024  # bytes of output in one message


class Output:
    """A stream that can be read from any offset, even after its end."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Command:
    """A command in a sandbox."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.stdin = process.stdin
        self.outputs = {1: Output(), 2: Output()}
        self.written = 0  # bytes of standard input that the command has received
        self.writing = asyncio.Lock()
        self.status: int | None = None
        self.ended = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self._pump(process.stdout, self.outputs[1])),
            asyncio.create_task(self._pump(process.stderr, self.outputs[2])),
        ]

    @staticmethod
    async def _pump(source: asyncio.StreamReader | None, output: Output) -> None:
        try:
            while source is not None and (data := await source.read(PIECE)):
                output.data += data
                output.notify()
        finally:
            output.ended = True
            output.notify()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Box:
    """A sandbox."""

    def __init__(self, request: Any, folder: Path) -> None:
        definition = request.definition
        self.id, self.task = f"sb-{secrets.token_hex(16)}", f"ta-{secrets.token_hex(11)}V"
        self.app, self.name, self.workdir = request.app_id, definition.name, definition.workdir
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.timeout, self.idle_timeout = definition.timeout_secs, definition.idle_timeout_secs
        self.created, self.idle_since = time.time(), time.monotonic()
        self.offline = definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        self.image = definition.image_id
        self.definition = str(definition)
        self.folder = folder
        self.mounts: list[Mount] = []
        self.commands: dict[str, Command] = {}
        self.status = Result.GENERIC_STATUS_UNSPECIFIED
        self.ended = asyncio.Event()
        self.ending = False
        self.ready_at = time.monotonic()

    def result(self) -> Any:
        return Result(status=self.status)
