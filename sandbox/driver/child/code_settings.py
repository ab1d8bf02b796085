"""Python settings that code changes and that would also affect the driver's functions in the same process."""

from __future__ import annotations

import gc
from sys import getprofile, getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DRIVER_DEPTH = 500  # stack frames, enough to describe an error


class CodeSettings:
    """Tracing, the recursion limit and garbage collection, as the code left them."""

    def __init__(self) -> None:
        self._trace: Any = None
        self._profile: Any = None
        self._recursion_limit = 0
        self._collects = True

    def enter(self) -> None:
        """Restore the code's settings before it runs."""
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
        """Save the code's settings after it ends, and reset them for the driver."""
        self._profile = _take(getprofile, setprofile)
        self._trace = _take(gettrace, settrace)
        self._collects = gc.isenabled()
        limit = getrecursionlimit()
        if limit < DRIVER_DEPTH:
            self._recursion_limit = limit
            setrecursionlimit(DRIVER_DEPTH)


def _take(get: Any, set_to: Any) -> Any:
    """Remove a trace or profile function and return it, or None."""
    try:
        function = get()
        if function is not None:
            set_to(None)
        return function
    except BaseException:
        return None  # The function traced this call and raised, so Python has removed it.
