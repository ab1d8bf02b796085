"""The delays and tags of task runs, and the state of a cancelled task run."""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec

import httpx
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from ..sandbox.errors import QuotaExceeded

P = ParamSpec("P")
DELAY_COUNT = 7  # the delays that Prefect gets: up to a minute, and it repeats the last
JITTER_FACTOR = 0.5  # a share of the delay, so that lanes that were refused together retry at different times


def get_requested_wait(error: BaseException) -> float:
    """Return the seconds that the provider asked to wait before a retry, or 0 if it did not ask."""
    return (error.retry_after or 0.0) if isinstance(error, QuotaExceeded) else 0.0


async def wait_as_requested(error: BaseException) -> None:
    """Wait as long as the provider asked. A jitter keeps lanes that were refused together from returning together."""
    await asyncio.sleep(get_requested_wait(error) * random.uniform(1.0, 1.1))


def return_cancelled_state(function: Callable[P, Coroutine[Any, Any, Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Let a task's function return the state Cancelled when it is cancelled.

    A caller that creates the task run with `return_state` must raise CancelledError if the state `is_cancelled`.
    """

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except asyncio.CancelledError:
            return Cancelled(message="cancelled before it was done")

    return run


def build_tags(provider: str | None) -> set[str]:
    """Return the tags of the task run of an execution. `provider` is the provider's name, if it is known."""
    return {"sandbox"} if provider is None else {"sandbox", f"sandbox:{provider}"}


async def has_tag_limit(tags: Iterable[str]) -> bool:
    """Return whether the Prefect server has a limit on one of these tags, or True if the server does not answer.

    If there is none at the start of a flow run, its task runs start without tags. Otherwise each would request a slot,
    which a server on SQLite refuses while it is writing. Then no task run would start for two to seven seconds.
    """
    try:
        async with get_client() as client:
            for name in tags:
                with suppress(ObjectNotFound):
                    await client.read_global_concurrency_limit_by_name(f"tag:{name}")
                    return True
    except httpx.HTTPError:
        return True
    return False


def show_tags(tags: Iterable[str]) -> None:
    """Add tags to the current task run after its start, when Prefect requests no more slots for them.

    The server shows them once the task run has ended.
    """
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.tags = sorted({*context.task_run.tags, *tags})
