"""Lines on their way to a location that cannot be appended to, such as a bucket.

They are held in memory, and sent together after a few seconds or when they are many, by a thread of their own: whoever
writes never waits for the network. A machine that goes away, or a process that is killed, takes those with it that were
not sent: INTERVAL seconds of them, and longer where the location is slow or away.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

SEND_INTERVAL_SECONDS = (
    5.0  # seconds that a line waits at most; each sending is a file of its own, and a reader has to list them all
)
SEND_SIZE_BYTES = 8 * 1024 * 1024  # bytes that are sent without waiting any longer
MAX_HELD_BYTES = 64 * 1024 * 1024  # bytes beyond which who writes waits: the location is slower than the results come
RETRY_PATIENCE_SECONDS = 60.0  # seconds for which a sending is tried again before it has failed
RETRY_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between the tries; the last stands for all later ones
LAST_TRY_SECONDS = 60.0  # seconds beyond PATIENCE for a try that is under way when the outbox is closed
LATE = "it has not answered yet"


class UploadBuffer:
    """Takes lines and sends them. `send` is called in its thread, with the sending's number, from 1, and its bytes.

    A sending that failed is tried again with the same number and bytes: where it did arrive, it is there once.
    """

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._size = 0
        self._since = 0.0  # when the first of the lines came, by the monotonic clock
        self._number = 0
        self._unsent: bytes | None = None  # what is being sent, or has failed to be
        self._failed: OSError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Takes a line. Raises OSError where what was taken before cannot be sent."""
        with self._changed:
            while self._failed is None and self._size >= MAX_HELD_BYTES:
                if not self._changed.wait(RETRY_PATIENCE_SECONDS + LAST_TRY_SECONDS):
                    raise OSError(errno.ETIMEDOUT, LATE)
            if self._failed is not None:
                raise self._failed
            if not self._lines:
                self._since = time.monotonic()
            self._lines.append(line)
            self._size += len(line)
            if self._thread is None:
                self._begin(RETRY_PATIENCE_SECONDS)
            self._changed.notify_all()

    def close(self) -> None:
        """Sends what is left, and returns when it is there. Raises OSError where it cannot be sent; it is kept then.

        Where a sending has failed before, it is tried once more. What is written later begins anew.
        """
        with self._changed:
            self._closing = True
            again, self._failed = self._failed is not None, None
            if self._thread is None and (self._lines or self._unsent is not None):
                self._begin(0.0 if again else RETRY_PATIENCE_SECONDS)
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(RETRY_PATIENCE_SECONDS + LAST_TRY_SECONDS)
        with self._changed:
            self._closing = False
            if self._failed is None and (self._lines or self._unsent is not None):
                self._failed = OSError(errno.ETIMEDOUT, LATE)
            if self._failed is not None:
                raise self._failed

    def _begin(self, patience: float) -> None:
        # A daemon: where the location hangs, the process ends all the same.
        self._thread = threading.Thread(target=self._work, args=(patience,), name="outbox", daemon=True)
        self._thread.start()

    def _work(self, patience: float) -> None:
        while True:
            with self._changed:
                while not self._due():
                    if self._closing:
                        self._thread = None
                        return
                    self._changed.wait(self._since + SEND_INTERVAL_SECONDS - time.monotonic() if self._lines else None)
                if self._unsent is None:
                    self._unsent = b"".join(self._lines)
                    self._number += 1
                    self._lines, self._size = [], 0
                    self._changed.notify_all()
                number, data = self._number, self._unsent
            failed = self._sent(number, data, patience)
            with self._changed:
                self._failed = failed
                if failed is None:
                    self._unsent = None
                else:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _due(self) -> bool:
        if self._unsent is not None:
            return True
        waited = time.monotonic() - self._since
        return bool(self._lines) and (self._closing or self._size >= SEND_SIZE_BYTES or waited >= SEND_INTERVAL_SECONDS)

    def _sent(self, number: int, data: bytes, patience: float) -> OSError | None:
        """Sends, again and again; what made the last try fail, once there is no more patience."""
        until = time.monotonic() + patience
        tried = 0
        while True:
            try:
                self._send(number, data)
                return None
            except Exception as error:  # noqa: BLE001 - whatever it is, the lines are not there
                failed = error if isinstance(error, OSError) else OSError(errno.EIO, str(error) or type(error).__name__)
                delay = RETRY_DELAYS_SECONDS[min(tried, len(RETRY_DELAYS_SECONDS) - 1)]
                tried += 1
                if time.monotonic() + delay > until:
                    return failed
            time.sleep(delay)
