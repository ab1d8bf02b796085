"""The state of a task run that was cancelled: Cancelled, where Prefect's own would be Crashed."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from prefect.states import Cancelled

P = ParamSpec("P")


def return_cancelled_state(function: Callable[P, Coroutine[Any, Any, Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Return a task's function that returns a state Cancelled when it is cancelled.

    A caller that creates the task run with `return_state` must raise CancelledError if the state `is_cancelled`.
    """

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except asyncio.CancelledError:
            return Cancelled(message="cancelled before it was done")

    return run
