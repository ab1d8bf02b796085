"""A pool of threads for blocking calls: as many as there are calls, up to a limit, reused, and daemons."""

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from .errors import SandboxStartError
from .intake.calls import host_memory, running_call

T = TypeVar("T")
MAX_THREADS = 256  # of one sandbox: calls beyond them wait; 8 MiB of address space each, and some 100 us to start


def start_thread(function: Callable[[], object], name: str) -> None:
    """Run the function in a new daemon thread. Raises SandboxStartError where the host has no room for one."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError as error:
        raise SandboxStartError(
            f"this host has no room for another thread ({error}): let this user or container have more processes "
            "(ulimit -u, pids limit) or memory, or use fewer workers"
        ) from error


class ThreadPool:
    """Runs functions in daemon threads, `MAX_THREADS` at a time: many, for calls may wait for each other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free_threads = 0  # those that do nothing, less the functions that wait for one
        self._is_closed = False

    def submit(self, function: Callable[[], None]) -> None:
        """Run the function soon, in a thread. It must not raise.

        Raises:
            SandboxStartError: No thread could be started, and there is none that runs it later.
        """
        with self._lock:
            self._free_threads -= 1
            needs_thread = self._free_threads < 0 and self._threads < MAX_THREADS
            if needs_thread:
                self._threads += 1
                self._free_threads += 1
        self._queue.put(function)
        if needs_thread:
            try:
                start_thread(self._run_functions, "rlm-batch-tool")
            except SandboxStartError:
                with self._lock:
                    self._threads -= 1
                    self._free_threads -= 1
                    if self._threads:
                        return
                    self._free_threads += 1
                    self._queue.get()
                raise

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Runs the function with the caller's context variables, and returns or raises what it does.

        A caller that is cancelled does not wait for it, and it is not run if it has not begun.
        """
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        work, call = [function], running_call.get()

        def finish(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def call_function() -> None:
            if done.cancelled():
                return
            if call is not None:
                host_memory.hold(call)
            try:
                outcome = work.pop()(), None
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
                outcome = None, error
            if call is not None:
                host_memory.let_go(call)
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(finish, *outcome)
            del outcome  # which an error's traceback leads back to

        self.submit(functools.partial(contextvars.copy_context().run, call_function))
        try:
            value, error = await done
        except asyncio.CancelledError:
            work.clear()  # it may be in the queue for long, with its arguments
            raise
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error

    def close(self) -> None:
        """Lets the threads that are idle go, and each of the others when it is done."""
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
