"""The wire to a local sandbox's driver: its standard input, written without blocking the event loop."""

import asyncio
import os
from collections.abc import Callable

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost
from ...sandbox.protocol import STALL_SECONDS


class LocalChannel:
    """The driver's standard input, written without blocking the loop.

    `closed` gets the reason where a driver takes none of its input for `stall_seconds`: that is the channel's end.
    """

    def __init__(
        self, fd: int, closed: Callable[[str], None] | None = None, *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._fd = fd
        self._closed = closed
        self._stall_seconds = stall_seconds
        self._end_reason = ""
        self._ready: asyncio.Event | None = None  # of the send that waits for room in the pipe
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Hands the bytes over, after those of earlier sends. Raises SandboxLost."""
        async with self._lock:
            rest = self._write(memoryview(data))
            if rest:
                await run_shielded(self._send_rest(rest))  # half a frame would be the end of the wire

    def close(self) -> None:
        """Ends every send that waits, with SandboxLost; called before the descriptor is closed."""
        self._end_reason = self._end_reason or "it was removed"
        if self._ready is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            self._ready.set()

    async def _send_rest(self, rest: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while rest:
            self._ready = asyncio.Event()
            loop.add_writer(self._fd, self._ready.set)
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await self._ready.wait()
            except TimeoutError:
                left = self._write(rest)  # it may be this process's loop that stood still
                if len(left) == len(rest):
                    self._end_reason = f"it has taken none of its input for {self._stall_seconds:g} s"
                    loop.remove_writer(self._fd)
                    if self._closed is not None:
                        self._closed(self._end_reason)
                rest = left
            finally:
                self._ready = None
                if not self._end_reason:
                    loop.remove_writer(self._fd)
            rest = self._write(rest)

    def _write(self, data: memoryview) -> memoryview:
        """What the pipe has no room for yet. Raises SandboxLost."""
        if self._end_reason:
            raise SandboxLost(f"the sandbox has gone ({self._end_reason}): run it in a new one")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:
            pass
        except OSError:
            raise SandboxLost("the sandbox's process has ended: run it in a new one") from None
        return data
