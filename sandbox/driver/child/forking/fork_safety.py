"""Safety of forks for executions: what the forked process must have or give up, and what each fork must renew."""

from __future__ import annotations

import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

END_SECONDS = 0.01  # time for a thread that is about to end
MAX_NAMES = 10  # names in a message
WORD_BITS = 32  # bits in each number of a numpy seed
SEED_BYTES = 32
# Exit functions that library modules register, for log handlers and processes. Python calls the last registered first.
EXIT_FUNCTIONS = (("logging", "shutdown"), ("multiprocessing.util", "_exit_function"))


class ThreadsLeftError(RuntimeError):
    """Threads that still run: a fork would not have them, and locks that they hold would stay locked."""


def import_common_modules() -> None:
    """Import the modules that most code and every traceback needs."""
    for name in ("json", "signal", "traceback", "linecache"):
        __import__(name)


def check_threads() -> None:
    """Raise ThreadsLeftError with the names of all threads besides the calling one."""
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
    """Clear the exit functions in a fork: they belong to the forked process, and each fork would run them again.

    Those that library modules register at import stay, because a fork needs them for its own objects.
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
    """Import, once for all forks, the generators that each fork seeds. Numpy imports its own only at first use."""
    __import__("random")
    if "numpy" in sys.modules:
        try:
            __import__("numpy.random")
        except ImportError:
            pass  # a module named numpy that is not numpy


def seed_generators(seed: int | None) -> None:
    """Seed the global random generators; None takes a seed from the operating system."""
    if seed is None:
        seed = int.from_bytes(os.urandom(SEED_BYTES), "little")
    __import__("random").seed(seed)
    # Modules named numpy or torch may be others, without these functions.
    seed_numpy: Any = getattr(sys.modules.get("numpy.random"), "seed", None)
    if seed_numpy is not None:
        seed_numpy([seed >> at & (1 << WORD_BITS) - 1 for at in range(0, 8 * SEED_BYTES, WORD_BITS)])
    seed_torch: Any = getattr(sys.modules.get("torch"), "manual_seed", None)
    if seed_torch is not None:
        seed_torch(seed & (1 << 63) - 1)
