"""The wire to a local sandbox's driver: its standard input, written without blocking the event loop."""

import asyncio
import os

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost


class LocalChannel:
    """The driver's standard input, written without blocking the loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Hands the bytes over, after those of earlier sends. Raises SandboxLost."""
        async with self._lock:
            rest = self._write(memoryview(data))
            if rest:
                await run_shielded(self._send_rest(rest))  # half a frame would be the end of the wire

    async def _send_rest(self, rest: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while rest:
            is_ready = asyncio.Event()
            loop.add_writer(self._fd, is_ready.set)
            try:
                await is_ready.wait()
            finally:
                loop.remove_writer(self._fd)
            rest = self._write(rest)

    def _write(self, data: memoryview) -> memoryview:
        """What the pipe has no room for yet. Raises SandboxLost."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:
            pass
        except OSError:
            raise SandboxLost("the sandbox's process has ended: run it in a new one") from None
        return data
