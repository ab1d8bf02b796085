"""The output of an execution up to the cap: the first half at once, the last half at the end."""

from __future__ import annotations

from codecs import getincrementaldecoder


class OutputStream:
    """One of an execution's output streams: it returns the first half of the cap at once and keeps the last half."""

    def __init__(self, cap: int) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._head = cap // 2
        self._cap = cap - cap // 2
        self._tail = ""
        self.dropped = 0  # characters

    def feed(self, data: bytes, final: bool = False) -> str:
        """Add output and return the text to send now."""
        text = self._decoder.decode(data, final)
        now = text[: self._head]
        self._head -= len(now)
        self._tail += text[len(now) :]
        if len(self._tail) > 2 * self._cap:
            self._trim()
        return now

    def finish(self) -> tuple[str, str]:
        """Return the rest of the first half from the decoder, and the last half."""
        now = self.feed(b"", final=True)
        self._trim()
        return now, self._tail

    def _trim(self) -> None:
        over = len(self._tail) - self._cap
        if over > 0:
            self.dropped += over
            self._tail = self._tail[over:]
