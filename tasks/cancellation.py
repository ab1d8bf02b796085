"""The state of a task run that was cancelled: Cancelled, where Prefect's own would be Crashed."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from prefect.states import Cancelled

P = ParamSpec("P")


def return_cancelled_state(function: Callable[P, Coroutine[Any, Any, Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """The function of a task, which returns a state Cancelled when it is cancelled.

    Whoever makes its task run with `return_state` has to raise CancelledError in turn, where the state `is_cancelled`.
    """

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except asyncio.CancelledError:
            return Cancelled(message="cancelled before it was done")

    return run
