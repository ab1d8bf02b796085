"""The connection to the driver in a container: standard input and output of the engine's `run --interactive`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost
from ...sandbox.protocol import STALL_SECONDS
from ...sandbox.wire.pipes import READ_BYTES
from .engine import describe_end

STDERR_BYTES = 2000
LAST_WORDS_SECONDS = 1.0
END_SECONDS = 10.0  # seconds for the engine's client to end after its container


class ContainerChannel:
    """The connection to a container's first process.

    `closed` gets the reason when the connection ends, or when the process reads no input for `STALL_SECONDS`.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, receive: Callable[[bytes], None], closed: Callable[[str], None]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.end_reason = ""  # why nothing more can be sent to the driver; "" while sending is possible
        self._process = process
        self._stdin = process.stdin
        self._receive = receive
        self._closed = closed
        self._lock = asyncio.Lock()
        self._stderr = b""
        self._reading_stderr = asyncio.create_task(self._read_stderr(process.stderr))
        self._reading_output = asyncio.create_task(self._read_output(process.stdout))

    async def send(self, data: bytes) -> None:
        """Send the bytes, after those of earlier sends. Raise SandboxLost."""
        async with self._lock:
            if self.end_reason:
                raise self._make_lost_error()
            await run_shielded(self._write(data))  # Shielded, because a partial frame would break the connection.

    async def _write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            async with asyncio.timeout(STALL_SECONDS):
                await self._stdin.drain()
        except TimeoutError:
            self._end(f"it read none of its input for {STALL_SECONDS:g} s")
            raise self._make_lost_error() from None
        except (OSError, RuntimeError):
            # The process has ended. The end of its output gives the reason.
            await asyncio.wait((self._reading_output,), timeout=END_SECONDS)
            self._end("its container has ended")
            raise self._make_lost_error() from None

    @property
    def stderr_tail(self) -> str:
        """Return the end of the standard error of the engine's client and the container's first process."""
        return self._stderr.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Close the connection. The driver then ends all processes, and the container ends with the driver."""
        self._end("it was removed")
        self._stdin.close()

    async def wait_closed(self) -> None:
        """Stop the tasks that read the output, and wait for their end."""
        self._reading_output.cancel()
        self._reading_stderr.cancel()
        await asyncio.wait((self._reading_output, self._reading_stderr))

    async def _read_output(self, stdout: asyncio.StreamReader) -> None:
        while data := await stdout.read(READ_BYTES):
            if not self.end_reason:
                self._receive(data)
        status = await self._process.wait()
        await asyncio.wait((self._reading_stderr,), timeout=LAST_WORDS_SECONDS)
        self._end(describe_end(status, self.stderr_tail))

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await stderr.read(READ_BYTES):
                self._stderr = (self._stderr + data)[-STDERR_BYTES:]

    def _end(self, reason: str) -> None:
        if not self.end_reason:
            self.end_reason = reason
            self._closed(reason)

    def _make_lost_error(self) -> SandboxLost:
        return SandboxLost(f"the container was lost ({self.end_reason}): run it in a new one")
