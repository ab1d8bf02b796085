"""The sending side of the wire to a local sandbox's driver."""

import asyncio
import os
from collections.abc import Callable

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import SandboxLost
from ...sandbox.protocol import STALL_SECONDS


class LocalChannel:
    """The driver's standard input, written without blocking the event loop.

    If the driver reads nothing for `stall_seconds`, the channel ends and `closed` gets the reason.
    """

    def __init__(
        self, fd: int, closed: Callable[[str], None] | None = None, *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._fd = fd
        self._closed = closed
        self._stall_seconds = stall_seconds
        self._end_reason = ""
        self._ready: asyncio.Event | None = None  # set when the pipe has room for a waiting send
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Send the bytes. Several calls send one after another. Raises SandboxLost."""
        async with self._lock:
            rest = self._write(memoryview(data))
            if rest:
                await run_shielded(self._send_rest(rest))  # A partial frame would break the wire.

    def close(self) -> None:
        """End waiting sends with SandboxLost. Call it before the descriptor is closed."""
        self._end_reason = self._end_reason or "it was removed"
        if self._ready is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            self._ready.set()

    async def _send_rest(self, rest: memoryview) -> None:
        while rest:
            has_room = await self._wait_for_room()
            before = len(rest)
            rest = self._write(rest)  # Also after a timeout, because the event loop itself may have stalled.
            if not has_room and len(rest) == before:
                self._end_reason = f"it read none of its input for {self._stall_seconds:g} s"
                if self._closed is not None:
                    self._closed(self._end_reason)
                raise self._make_lost_error()

    async def _wait_for_room(self) -> bool:
        """Wait until the pipe has room, or the channel ends. Return False after `stall_seconds`."""
        loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        loop.add_writer(self._fd, self._ready.set)
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._ready.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._ready = None
            if not self._end_reason:  # `close` removed the writer, and the descriptor may be another file's now.
                loop.remove_writer(self._fd)

    def _write(self, data: memoryview) -> memoryview:
        """Write what the pipe has room for, and return the rest. Raises SandboxLost."""
        if self._end_reason:
            raise self._make_lost_error()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:
            pass
        except OSError:
            raise SandboxLost("the sandbox's process has ended: run it in a new one") from None
        return data

    def _make_lost_error(self) -> SandboxLost:
        return SandboxLost(f"the sandbox was lost ({self._end_reason}): run it in a new one")
