"""What a process must have, and have no more, when it is forked for executions; what each fork must have of its own."""

from __future__ import annotations

import _thread
import os
import sys
import time

from ..thread_execution import wrap_thread_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

START_SECONDS = 5  # in which the busiest machine lets a thread that was asked for begin
END_SECONDS = 0.01  # for a thread that is at its end
MAX_NAMES = 10  # in a sentence
WORD_BITS = 32  # of which numpy takes a seed
SEED_BYTES = 32
# Of modules, for the processes and the log handlers that there are then: what is last is called first.
EXIT_FUNCTIONS = (("logging", "shutdown"), ("multiprocessing.util", "_exit_function"))


class ThreadsLeftError(RuntimeError):
    """Threads that run on: a fork has none of them, and what they hold stays as it was."""


def import_common_modules() -> None:
    """Imports what most code and every traceback needs."""
    for name in ("json", "signal", "traceback", "linecache"):
        __import__(name)


class ThreadStarts:
    """Threads that were asked of _thread and have not begun: it counts a thread only when that has begun to run."""

    def __init__(self) -> None:
        self._start = _thread.start_new_thread
        self._pending: list[None] = []  # as many as there are threads: append and pop are each one step

    def watch(self) -> None:
        """Sees every thread that _thread is asked for from now on; those of threading are waited for by that itself."""
        _thread.start_new_thread = _thread.start_new = wrap_thread_start(self._start, self._expect)

    def end(self) -> None:
        """Gives _thread its own function back, and waits for the threads that have not begun."""
        _thread.start_new_thread = _thread.start_new = self._start
        deadline = time.monotonic() + START_SECONDS
        while self._pending and time.monotonic() < deadline:
            time.sleep(0.001)

    def _expect(self) -> Callable[[], None]:
        self._pending.append(None)
        return self._pending.pop


def check_threads() -> None:
    """Raises ThreadsLeftError, with the names of the threads that run beside the calling one."""
    names, unnamed = _list_threads()
    if names or unnamed > 0:
        time.sleep(END_SECONDS)
        names, unnamed = _list_threads()
    if unnamed > 0:
        names.append(f"{unnamed} that _thread started" if names else f"{unnamed} without a name, which _thread started")
    if names:
        more = len(names) - MAX_NAMES
        raise ThreadsLeftError(", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else ""))


def _list_threads() -> tuple[list[str], int]:
    threading: Any = sys.modules.get("threading")
    threads: list[Any] = [] if threading is None else threading.enumerate()
    own = _thread.get_ident()
    names = [str(thread.name) for thread in threads if thread.ident != own]
    return names, _thread._count() - len(names)  # type: ignore[reportPrivateUsage]


def disarm_finalizers() -> None:
    """Forgets what is to be done when the process ends, for it is the forked one's: each fork would do it.

    What modules of the library have registered when they were imported stays, for what a fork has of its own.
    """
    import atexit

    atexit._clear()  # type: ignore[reportPrivateUsage]
    for name, function in EXIT_FUNCTIONS:
        at_exit: Any = getattr(sys.modules.get(name), function, None)
        if at_exit is not None:
            atexit.register(at_exit)
    finalize: Any = getattr(sys.modules.get("weakref"), "finalize", None)
    if finalize is not None:
        for entry in list(finalize._registry):
            entry.atexit = False
        finalize._registered_with_atexit = False
    registry: Any = getattr(sys.modules.get("multiprocessing.util"), "_finalizer_registry", None)
    if registry is not None:
        registry.clear()


def load_generators() -> None:
    """Imports what every fork seeds, and what numpy imports only when it is first used: once, and not in each."""
    __import__("random")
    if "numpy" in sys.modules:
        try:
            __import__("numpy.random")
        except ImportError:
            pass  # another numpy than numpy


def seed_generators(seed: int | None) -> None:
    """Seeds the global random generators; None takes a seed from the operating system."""
    if seed is None:
        seed = int.from_bytes(os.urandom(SEED_BYTES), "little")
    __import__("random").seed(seed)
    # What is called numpy or torch may be a stand-in without them.
    seed_numpy: Any = getattr(sys.modules.get("numpy.random"), "seed", None)
    if seed_numpy is not None:
        seed_numpy([seed >> at & (1 << WORD_BITS) - 1 for at in range(0, 8 * SEED_BYTES, WORD_BITS)])
    seed_torch: Any = getattr(sys.modules.get("torch"), "manual_seed", None)
    if seed_torch is not None:
        seed_torch(seed & (1 << 63) - 1)
