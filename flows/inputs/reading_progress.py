"""How far a large file of inputs has been read, in lines for a person."""

import time
from collections.abc import Callable

Report = Callable[[str], None]  # takes a line for a person
OnBytes = Callable[[int], None]  # takes how many bytes of a file have been read

LARGE_BYTES = 4 * 1024 * 1024  # of a file whose reading is told at once
INTERVAL_SECONDS = 2.0  # between two lines


class ReadingProgress:
    """Reports that a large file is being read, and then every two seconds how much of it has been."""

    def __init__(self, name: str, size: int, report: Report | None) -> None:
        self._name, self._size, self._report = name, size, report
        self._reported_at = time.monotonic()
        if report is not None and size >= LARGE_BYTES:
            report(f"reading {name}, {size / 1e6:.0f} MB")

    def on_bytes(self, count: int) -> None:
        """Takes how many bytes have been read, which is less than before where a file is read again."""
        now = time.monotonic()
        if self._report is not None and now >= self._reported_at + INTERVAL_SECONDS:
            self._reported_at = now
            self._report(f"reading {self._name}: {min(100, 100 * count // max(1, self._size))}%")
