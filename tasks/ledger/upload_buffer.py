"""A buffer of lines for a location that cannot be appended to, such as a bucket.

They are held in memory, and sent together after a few seconds or when they are many, by a thread of their own: whoever
writes never waits for the network. A machine that goes away, or a process that is killed, takes those with it that were
not sent: SEND_INTERVAL_SECONDS of them, and longer where the location is slow or away.
"""

import errno
import threading
import time
from collections.abc import Callable

SEND_INTERVAL_SECONDS = 5.0  # that a line waits at most; each sending is a file, and a reader has to list them all
SEND_SIZE_BYTES = 8 * 1024 * 1024  # that are sent without waiting any longer
MAX_HELD_BYTES = 64 * 1024 * 1024  # beyond which a writer waits: the location is slower than the results come
RETRY_PATIENCE_SECONDS = 60.0  # for which a sending is retried before it has failed
RETRY_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # between the tries; the last stands for all later ones
LAST_TRY_SECONDS = 60.0  # beyond RETRY_PATIENCE_SECONDS, for a try that is running when the buffer is closed
TIMEOUT_TEXT = "it has not answered yet"


class UploadBuffer:
    """Takes lines and sends them. `send` is called in its thread, with the sending's number, from 1, and its bytes.

    A sending that failed is tried again with the same number and bytes: where it did arrive, it is there once.
    """

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._size = 0
        self._first_line_at = 0.0  # when the first of the lines came, by the monotonic clock
        self._number = 0
        self._unsent: bytes | None = None  # is being sent, or could not be
        self._error: OSError | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Takes a line. Raises OSError where what was taken before cannot be sent."""
        with self._changed:
            while self._error is None and self._size >= MAX_HELD_BYTES:
                if not self._changed.wait(RETRY_PATIENCE_SECONDS + LAST_TRY_SECONDS):
                    raise OSError(errno.ETIMEDOUT, TIMEOUT_TEXT)
            if self._error is not None:
                raise self._error
            if not self._lines:
                self._first_line_at = time.monotonic()
            self._lines.append(line)
            self._size += len(line)
            if self._thread is None:
                self._start_thread(RETRY_PATIENCE_SECONDS)
            self._changed.notify_all()

    def close(self) -> None:
        """Sends all lines, and waits until they are there. Raises OSError, and keeps them, where they cannot be sent.

        A sending that has failed before is tried once more. The buffer can be written to again afterwards.
        """
        with self._changed:
            self._is_closing = True
            has_failed, self._error = self._error is not None, None
            if self._thread is None and (self._lines or self._unsent is not None):
                self._start_thread(0.0 if has_failed else RETRY_PATIENCE_SECONDS)
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(RETRY_PATIENCE_SECONDS + LAST_TRY_SECONDS)
        with self._changed:
            self._is_closing = False
            if self._error is None and (self._lines or self._unsent is not None):
                self._error = OSError(errno.ETIMEDOUT, TIMEOUT_TEXT)
            if self._error is not None:
                raise self._error

    def _start_thread(self, patience: float) -> None:
        # A daemon: where the location hangs, the process ends all the same.
        self._thread = threading.Thread(target=self._send_lines, args=(patience,), name="outbox", daemon=True)
        self._thread.start()

    def _send_lines(self, patience: float) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    if self._is_closing:
                        self._thread = None
                        return
                    due_at = self._first_line_at + SEND_INTERVAL_SECONDS
                    self._changed.wait(due_at - time.monotonic() if self._lines else None)
                if self._unsent is None:
                    self._unsent = b"".join(self._lines)
                    self._number += 1
                    self._lines, self._size = [], 0
                    self._changed.notify_all()
                number, data = self._number, self._unsent
            error = self._send_with_retries(number, data, patience)
            with self._changed:
                self._error = error
                if error is None:
                    self._unsent = None
                else:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _is_due(self) -> bool:
        if self._unsent is not None:
            return True
        is_old = time.monotonic() - self._first_line_at >= SEND_INTERVAL_SECONDS
        return bool(self._lines) and (self._is_closing or self._size >= SEND_SIZE_BYTES or is_old)

    def _send_with_retries(self, number: int, data: bytes, patience: float) -> OSError | None:
        """Sends, with retries for `patience` seconds; the last error where all of them failed."""
        deadline_at = time.monotonic() + patience
        failure_count = 0
        while True:
            try:
                self._send(number, data)
                return None
            except Exception as error:  # noqa: BLE001 - whatever it is, the lines are not there
                text = str(error) or type(error).__name__
                last_error = error if isinstance(error, OSError) else OSError(errno.EIO, text)
                delay = RETRY_DELAYS_SECONDS[min(failure_count, len(RETRY_DELAYS_SECONDS) - 1)]
                failure_count += 1
                if time.monotonic() + delay > deadline_at:
                    return last_error
            time.sleep(delay)
