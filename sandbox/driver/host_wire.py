"""The supervisor's end of the wire to the host: numbered frames, and files for bodies too large for a frame."""

from __future__ import annotations

import os
import time

from ..wire.frames import FrameReader, encode_frame, take_file
from ..wire.pipes import read_available

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .event_loop import EventLoop

FILE_ABOVE_BYTES = 256 * 1024  # larger bodies go to the host as a file, if the settings name a folder
MAX_BACKLOG_BYTES = 8 * 1024 * 1024  # bytes that wait for the host; above this, children are not read


class HostWire:
    """The frames to and from the host.

    `pause` is called with True when the host falls behind, and with False when it has caught up.
    `is_closed` is True once the host has closed the wire. `last_sent` and `last_heard` are monotonic seconds.
    `files_folder` is the folder for large bodies. With None, all bodies go over the wire.
    """

    def __init__(self, reads: int, writes: int, secret: str, loop: EventLoop, pause: Callable[[bool], None]) -> None:
        self.reads, self.writes = reads, writes
        self.is_closed = False
        self.is_paused = False
        self.files_folder: str | None = None
        self.last_sent = self.last_heard = time.monotonic()
        self._secret = secret
        self._loop = loop
        self._pause = pause
        self._frames = FrameReader()
        self._backlog = bytearray()
        self._frames_sent = 0
        self._last_number = -1  # number of the last frame from the host

    def send(self, header: dict[str, Any], body: bytes | None = None) -> None:
        self._frames_sent += 1
        header["n"] = self._frames_sent
        self.last_sent = time.monotonic()
        if body is not None:
            if len(body) < 2:
                body += b" "  # Some wires begin each line with a marker, and hold back lines shorter than it.
            elif len(body) > FILE_ABOVE_BYTES and self.files_folder:
                body = self._write_file(header, body)
        self._backlog += encode_frame(header, body)
        self._flush()

    def read(self) -> list[tuple[dict[str, Any], bytes | None]]:
        """Read available bytes from the host, and return the frames that they complete."""
        data = read_available(self.reads)
        if data is None:
            return []
        if not data:
            self.is_closed = True
            return []
        self.last_heard = time.monotonic()
        return self.parse(data)

    def parse(self, data: bytes) -> list[tuple[dict[str, Any], bytes | None]]:
        """Return the frames that these bytes complete. A wire that was interrupted may repeat frames: drop them."""
        frames: list[tuple[dict[str, Any], bytes | None]] = []
        for header, body in self._frames.feed(data):
            if header["n"] <= self._last_number:
                continue
            self._last_number = header["n"]
            if "file" in header:
                body = take_file(header["file"])
            frames.append((header, body))
        return frames

    def _write_file(self, header: dict[str, Any], body: bytes) -> bytes | None:
        """Write the body to a file named in the header and return None; return the body if that fails."""
        path = f"{self.files_folder}/out.{self._secret}.{self._frames_sent}"
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(body)
        except OSError:
            return body  # a full disk: the wire is slower but works
        header["file"] = path
        return None

    def _flush(self) -> None:
        if not self._loop.flush(self.writes, self._backlog, self._flush):
            self.is_closed = True
        elif not self.is_paused and len(self._backlog) > MAX_BACKLOG_BYTES:
            self.is_paused = True
            self._pause(True)
        elif self.is_paused and not self._backlog:
            self.is_paused = False
            self._pause(False)
