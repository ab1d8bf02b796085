"""Settings of Python that code changes, and that would hold for the driver's own functions in the same process."""

from __future__ import annotations

import gc
from sys import getprofile, getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DRIVER_DEPTH = 500  # of Python's stack, which is enough to describe an error


class CodeSettings:
    """Tracing, the recursion limit and garbage collection, as the code left them."""

    def __init__(self) -> None:
        self._trace: Any = None
        self._profile: Any = None
        self._recursion_limit = 0
        self._collects = True

    def enter(self) -> None:
        """Gives them to code that is about to run."""
        if self._recursion_limit:
            setrecursionlimit(self._recursion_limit)
            self._recursion_limit = 0
        if self._collects:
            gc.enable()
        if self._trace is not None:
            settrace(self._trace)
        if self._profile is not None:
            setprofile(self._profile)

    def leave(self) -> None:
        """Takes them from code that has ended: what follows is the driver's."""
        self._profile = _take(getprofile, setprofile)
        self._trace = _take(gettrace, settrace)
        self._collects = gc.isenabled()
        limit = getrecursionlimit()
        if limit < DRIVER_DEPTH:
            self._recursion_limit = limit
            setrecursionlimit(DRIVER_DEPTH)


def _take(get: Any, set_to: Any) -> Any:
    """The function that is called for what runs, which is called no more; None where there is none."""
    try:
        function = get()
        if function is not None:
            set_to(None)
        return function
    except BaseException:
        return None  # it has raised when it was called for this, upon which Python calls it no more
