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


class ContainerChannel:
    """The connection to a container's first process.

    `closed` gets the reason when the connection ends, or when the process reads no input for `STALL_SECONDS`.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, receive: Callable[[bytes], None], closed: Callable[[str], None]
    ) -> None:
        self._process = process
        self._receive = receive
        self._closed = closed
        self._lock = asyncio.Lock()
        self._stderr = b""
        self.end_reason = ""
        self._tasks = [asyncio.create_task(self._read_stderr()), asyncio.create_task(self._read_output())]

    async def send(self, data: bytes) -> None:
        """Send the bytes, after those of earlier sends. Raise SandboxLost."""
        async with self._lock:
            if self.end_reason or self._process.stdin is None:
                raise SandboxLost(f"the container was lost ({self.end_reason}): run it in a new one")
            self._process.stdin.write(data)
            await run_shielded(self._drain())

    async def _drain(self) -> None:
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._process.stdin.drain()
        except TimeoutError:
            self._end(f"it read none of its input for {STALL_SECONDS:g} s")
            raise SandboxLost(f"the container was lost ({self.end_reason}): run it in a new one") from None
        except (OSError, RuntimeError):
            raise SandboxLost("the container has ended: run it in a new one") from None

    @property
    def stderr_tail(self) -> str:
        """Return the end of the standard error of the engine's client and the container's first process."""
        return self._stderr.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Close the connection. The driver then ends all processes, and the container ends with the driver."""
        self._end("it was removed", is_told=False)
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def wait_closed(self) -> None:
        """Stop the tasks that read the output, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(READ_BYTES):
            if not self.end_reason:
                self._receive(data)
        status = await self._process.wait()
        await asyncio.wait([self._tasks[0]], timeout=1.0)
        self._end(describe_end(status, self.stderr_tail))

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError):
            while data := await self._process.stderr.read(READ_BYTES):
                self._stderr = (self._stderr + data)[-STDERR_BYTES:]

    def _end(self, reason: str, *, is_told: bool = True) -> None:
        if not self.end_reason:
            self.end_reason = reason
            if is_told:
                self._closed(reason)
