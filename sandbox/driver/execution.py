"""One execution under way, and its output."""

from __future__ import annotations

import time
from codecs import getincrementaldecoder


class OutputStream:
    """One of an execution's output streams: its first half goes out as it comes, its last half is kept."""

    def __init__(self, cap: int) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._head = cap // 2
        self._cap = cap - cap // 2
        self._tail = ""
        self.dropped = 0  # characters

    def feed(self, data: bytes, final: bool = False) -> str:
        """What may be sent now."""
        text = self._decoder.decode(data, final)
        now = text[: self._head]
        self._head -= len(now)
        self._tail += text[len(now) :]
        if len(self._tail) > 2 * self._cap:
            self._trim()
        return now

    def finish(self) -> tuple[str, str]:
        """What the decoder still held that belongs to the first half, and the last half."""
        now = self.feed(b"", final=True)
        self._trim()
        return now, self._tail

    def _trim(self) -> None:
        over = len(self._tail) - self._cap
        if over > 0:
            self.dropped += over
            self._tail = self._tail[over:]


class Execution:
    """One execution; `timeout` is in seconds, and `output_cap` is a number of characters of each stream."""

    def __init__(self, number: int, timeout: float | None, output_cap: int, secret: str) -> None:
        self.id = number
        self.token = f"{secret}.{number}"
        self.timeout = timeout
        self.deadline: float | None = None  # monotonic seconds, as those below
        self.start_clock()
        self.kill_at: float | None = None
        self.has_second_interrupt = False  # to come before it is killed
        self.end_cause = ""  # why we ended it: timeout, cancelled, channel
        self.submitted: bytes | None = None
        self.status = ""  # the child's last word
        self.outcome: bytes | None = None
        self.files: bytes | None = None  # that it wrote on the volume
        self.streams: dict[str, OutputStream] = {}  # of those that it has written to
        self._output_cap = output_cap

    def start_clock(self) -> None:
        self.started_at = time.monotonic()
        self.deadline = None if self.timeout is None else self.started_at + self.timeout

    def read_output(self, stream: str, data: bytes) -> str:
        """What of these bytes may be sent now."""
        if stream not in self.streams:
            self.streams[stream] = OutputStream(self._output_cap)
        return self.streams[stream].feed(data)
