"""Which execution a thread belongs to: that of the thread that has started it."""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ThreadExecution(_thread._local):  # type: ignore[reportPrivateUsage]
    """The execution that the calling thread belongs to, by its number and its token.

    Each thread has values of its own here, and finds no other's. Native code's threads belong to none.
    """

    number = 0
    token = ""

    def begin(self, number: int, token: str, is_only: bool) -> None:
        """From now on the calling thread belongs to that execution; every thread does where there is no other."""
        owner = type(self) if is_only else self
        owner.number, owner.token = number, token

    @classmethod
    def forget(cls) -> None:
        """Threads that were told of no execution belong to none: in a fork the last one was another's."""
        cls.number, cls.token = 0, ""

    def pass_on(self) -> None:
        """Has each thread that is started from now on belong to the execution of the one that starts it."""
        threading = sys.modules.get("threading")
        for name in ("start_new_thread", "start_new", "start_joinable_thread"):  # the last from Python 3.13 on
            start = getattr(_thread, name, None)
            if start is not None:
                wrapper = wrap_thread_start(start, self._hand_on)
                setattr(_thread, name, wrapper)
                if hasattr(threading, "_" + name):
                    setattr(threading, "_" + name, wrapper)

    def _hand_on(self) -> Callable[[], None]:
        # In a list, which is empty once the thread has it: what stands in a frame any thread can read.
        handed = [(self.number, self.token)]

        def take() -> None:
            self.number, self.token = handed.pop()

        return take


def wrap_thread_start(start: Callable[..., Any], expect: Callable[[], Callable[[], Any]]) -> Callable[..., Any]:
    """A function that starts threads as `start`, one of _thread's, does.

    `expect` is called where a thread is asked for. What it returns is called in the thread, before anything else, or at
    once where none could be started.
    """

    def start_thread(function: Any, *args: Any, **options: Any) -> Any:
        if not callable(function):
            return start(function, *args, **options)  # which says what is wrong
        begin = expect()

        def run(*values: Any, **keywords: Any) -> Any:
            begin()
            return function(*values, **keywords)

        try:
            return start(run, *args, **options)
        except Exception:
            begin()
            raise

    start_thread.__name__ = start_thread.__qualname__ = start.__name__
    start_thread.__doc__ = start.__doc__
    return start_thread
