"""A pool of threads for blocking calls: as many as there are calls, reused, and daemons."""

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
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle_threads = 0
        self._is_closed = False

    def submit(self, function: Callable[[], None]) -> None:
        """Runs the function soon, in a thread. It must not raise."""
        with self._lock:
            has_idle, self._idle_threads = self._idle_threads, max(0, self._idle_threads - 1)
        self._queue.put(function)
        if not has_idle:
            threading.Thread(target=self._run_functions, name="rlm-batch-tool", daemon=True).start()

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Runs the function with the caller's context variables, and returns or raises what it does.

        A caller that is cancelled does not wait for it.
        """
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def call_function() -> None:
            try:
                outcome = function(), None
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(finish, *outcome)

        self.submit(functools.partial(contextvars.copy_context().run, call_function))
        value, error = await done
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Lets the threads that are idle go, and each of the others when it is done."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._idle_threads):
                self._queue.put(None)
            self._idle_threads = 0

    def _run_functions(self) -> None:
        while (function := self._queue.get()) is not None:
            function()
            with self._lock:
                if self._is_closed:
                    return
                self._idle_threads += 1
