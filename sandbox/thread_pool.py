"""Threads for what blocks: as many as there are calls, reused, and none that keeps a program from ending."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadPool:
    """Runs functions in daemon threads. A pool of a fixed size could not serve calls that wait for each other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Runs it soon. It must not raise."""
        with self._lock:
            idle, self._idle = self._idle, max(0, self._idle - 1)
        self._work.put(work)
        if not idle:
            threading.Thread(target=self._serve, name="rlm-batch-tool", daemon=True).start()

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Runs it with the caller's context variables, and returns or raises what it does.

        A caller that is cancelled does not wait for it.
        """
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def carry_out() -> None:
            try:
                outcome = work(), None
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(finish, *outcome)

        self.submit(functools.partial(contextvars.copy_context().run, carry_out))
        value, error = await done
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Lets the threads that are idle go, and each of the others when it is done."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._work.put(None)
            self._idle = 0

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                if self._closed:
                    return
                self._idle += 1
