"""The execution that a thread belongs to. A new thread belongs to the execution of the thread that started it."""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ThreadExecution(_thread._local):  # type: ignore[reportPrivateUsage]
    """The number and token of the calling thread's execution.

    Each thread sees only its own values here. Threads of native code belong to no execution.
    """

    number = 0
    token = ""

    def begin(self, number: int, token: str, is_only: bool) -> None:
        """Assign the execution to the calling thread; with `is_only`, make it every thread's default."""
        owner = type(self) if is_only else self
        owner.number, owner.token = number, token

    @classmethod
    def forget(cls) -> None:
        """Remove the threads' default execution, which a fork inherits from its parent."""
        cls.number, cls.token = 0, ""

    def pass_on(self) -> None:
        """Make each future thread belong to the execution of the thread that starts it."""
        threading = sys.modules.get("threading")
        for name in ("start_new_thread", "start_new", "start_joinable_thread"):  # the last one from Python 3.13 on
            start = getattr(_thread, name, None)
            if start is not None:
                wrapper = self._wrap(start)
                setattr(_thread, name, wrapper)
                if hasattr(threading, "_" + name):
                    setattr(threading, "_" + name, wrapper)

    def _wrap(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def start_thread(function: Any, *args: Any, **options: Any) -> Any:
            # The new thread empties this list, because any thread could read the token in a frame's variables.
            handed = [(self.number, self.token)]

            def run(*values: Any, **keywords: Any) -> Any:
                self.number, self.token = handed.pop()
                return function(*values, **keywords)

            return start(run, *args, **options)

        start_thread.__name__ = start_thread.__qualname__ = start.__name__
        return start_thread
