"""What an execution prints, up to the cap: the first half as it comes, the last half at its end."""

from __future__ import annotations

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
