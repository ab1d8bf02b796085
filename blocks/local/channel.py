"""The wire to a local sandbox's driver: its standard input, written without blocking the event loop."""

from __future__ import annotations

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
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    await run_shielded(self._send_rest(rest))  # half a frame would be the end of the wire
                    return
                except OSError:
                    raise SandboxLost("the sandbox's process has ended: run it in a new one") from None

    async def _send_rest(self, rest: memoryview) -> None:
        while rest:
            await self._writable()
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                raise SandboxLost("the sandbox's process has ended: run it in a new one") from None

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_writer(self._fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_writer(self._fd)
