"""The connection to a driver in Modal: the standard input and output of its process."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import modal

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost
from ...sandbox.wire.pipes import READ_BYTES
from .errors import THROTTLE_SECONDS, get_last_line, retry_refused

SEND_SECONDS = 90.0  # seconds for the driver to read a piece of its input; a driver without input ends then too
PIECE_BYTES = 4 * 1024 * 1024  # bytes of input per write; the client accepts at most 16 MiB
STDERR_BYTES = 2000
READ_SECONDS = 5.0  # seconds to read the last output of a driver that has ended


class ModalChannel:
    """The connection to a driver's process. `first_input` is sent before the first frame."""

    def __init__(
        self,
        process: Any,
        first_input: bytes,
        receive: Callable[[bytes], None],
        closed: Callable[[str], None],
        sandbox_id: str,
    ) -> None:
        self.end_reason = ""  # why nothing more can be sent to the driver; "" while sending is possible
        self.is_complete = False  # True if the driver has ended and its whole output was received
        self._process = process
        self._receive = receive
        self._closed = closed
        self._sandbox_id = sandbox_id
        self._lock = asyncio.Lock()
        process.stdin.write(first_input)
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Stop reading and sending."""
        self._end("it was removed")
        self._reading.cancel()

    async def send(self, data: bytes) -> None:
        """Send the bytes after earlier sends are done. A failure closes the connection, which raises nothing here.

        Raises:
            SandboxLost: The connection was closed before, so nothing was sent.
        """
        async with self._lock:
            if self.end_reason:
                raise SandboxLost(f"sandbox {self._sandbox_id} was lost ({self.end_reason}): run it in a new one")
            await run_shielded(self._write(data))  # Shielded, because a partial frame would break the connection.

    async def _write(self, data: bytes) -> None:
        stdin = self._process.stdin
        try:
            for start in range(0, len(data), PIECE_BYTES):
                async with asyncio.timeout(SEND_SECONDS):
                    stdin.write(data[start : start + PIECE_BYTES])
                    await retry_refused(stdin.drain.aio)
        except (modal.exception.Error, TimeoutError) as error:
            # If the driver has ended, its reader closes the connection first, with its last words as the reason.
            await asyncio.wait((self._reading,), timeout=READ_SECONDS)
            # The driver may have received everything, so the outcome is unknown.
            self._end(f"it took no input: {get_last_line(error)}")

    def _end(self, reason: str) -> None:
        if not self.end_reason:
            self.end_reason = reason
            self._closed(reason)

    async def _read(self) -> None:
        try:
            await self._read_output()
        except Exception as error:  # noqa: BLE001 - after any error there is nothing more to read
            self._end(f"its output ended early: {type(error).__name__}: {get_last_line(error)}")
            return
        self.is_complete = True
        last_words = ""
        with suppress(Exception):  # The client also raises errors of the network's libraries.
            async with asyncio.timeout(READ_SECONDS):
                stderr = await self._process.stderr.read.aio()
                last_words = stderr[-STDERR_BYTES:].decode("utf-8", "replace").strip()
        self._end(f"its process has ended: {last_words}" if last_words else "its process has ended")

    async def _read_output(self) -> None:
        """Receive the whole output. After an interruption, the client continues the stream at the same position."""
        loop = asyncio.get_running_loop()
        last_heard = loop.time()
        delay = 0.1
        while True:
            try:
                async for data in self._process.stdout:
                    last_heard = loop.time()
                    delay = 0.1
                    for start in range(0, len(data), READ_BYTES):
                        self._receive(data[start : start + READ_BYTES])
                        await asyncio.sleep(0)  # A megabyte of tiny frames would block the loop for a second.
                return
            except (
                modal.exception.ResourceExhaustedError,
                modal.exception.ServiceError,
                modal.exception.InternalError,
                modal.exception.ConnectionError,
            ):
                if loop.time() + delay > last_heard + THROTTLE_SECONDS:
                    raise
                await asyncio.sleep(delay)
                delay = min(2 * delay, 5.0)
