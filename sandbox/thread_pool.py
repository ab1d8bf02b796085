"""A pool of daemon threads for blocking calls. It starts a thread for each concurrent call, up to a limit."""

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from .errors import SandboxStartError

T = TypeVar("T")
MAX_THREADS = 256  # per sandbox; further calls wait. A thread takes 8 MiB of address space and some 100 us to start.


def start_thread(function: Callable[[], object], name: str) -> None:
    """Run the function in a new daemon thread. Raise SandboxStartError if the host cannot start one."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError as error:
        raise SandboxStartError(
            f"this host cannot start another thread ({error}): raise its limit of processes (ulimit -u, "
            "pids limit) or memory, or use fewer workers"
        ) from error


class ThreadPool:
    """A pool of at most `MAX_THREADS` daemon threads. The limit is high because calls may wait for each other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free_threads = 0  # idle threads minus queued functions
        self._is_closed = False

    def submit(self, function: Callable[[], None]) -> None:
        """Run the function soon, in a thread. It must not raise. Raises SandboxStartError if a thread cannot start."""
        with self._lock:
            if self._free_threads <= 0 and self._threads < MAX_THREADS:
                start_thread(self._run_functions, "rlm-batch-tool")
                self._threads += 1
                self._free_threads += 1
            self._free_threads -= 1
        self._queue.put(function)

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run the function with the caller's context variables. Return its result or raise its error.

        A cancelled caller does not wait for the function, which is skipped if it has not begun.
        """
        # A future refuses a StopIteration as its error, so the error is part of the result.
        future: concurrent.futures.Future[tuple[Any, BaseException | None]] = concurrent.futures.Future()

        def call_function() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                outcome = function(), None
            except BaseException as error:  # noqa: BLE001 - raised for the caller of `run_in_thread`
                outcome = None, error
            future.set_result(outcome)

        self.submit(functools.partial(contextvars.copy_context().run, call_function))
        value, error = await asyncio.wrap_future(future)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # Its traceback would form a reference cycle.

    def close(self) -> None:
        """End the idle threads now, and each busy thread after its function."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _run_functions(self) -> None:
        while (function := self._queue.get()) is not None:
            function()
            with self._lock:
                if self._is_closed:
                    return
                self._free_threads += 1
