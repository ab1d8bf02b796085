"""Threads for tools: as many as there are calls, reused, and none that keeps a program from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Threads:
    """Runs functions in daemon threads. A pool of a fixed size could not serve calls that wait for each other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, work: Callable[[], None]) -> None:
        """Runs it soon. It must not raise."""
        with self._lock:
            idle, self._idle = self._idle, max(0, self._idle - 1)
        self._work.put(work)
        if not idle:
            threading.Thread(target=self._serve, name="rlm-batch-tool", daemon=True).start()

    def close(self) -> None:
        """Lets the threads that are idle go; one that is busy goes when the process does."""
        with self._lock:
            for _ in range(self._idle):
                self._work.put(None)
            self._idle = 0

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._idle += 1
