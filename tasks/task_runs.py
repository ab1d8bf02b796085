"""The tags of task runs, which Prefect's tag limits can use, and the state of a cancelled task run."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec

import httpx
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
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


def build_tags(provider: str | None) -> set[str]:
    """Return the tags of an execution's task run on the provider of that name."""
    return {"sandbox"} if provider is None else {"sandbox", f"sandbox:{provider}"}


async def has_tag_limit(tags: Iterable[str]) -> bool:
    """Return whether the Prefect server has a limit on one of these tags, or True if the server does not answer.

    Without a limit at the start of a flow run, its task runs start without tags: requests of slots would cost time.
    A server on SQLite refuses them while it is writing, and then no task run starts for two to seven seconds.
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
    """Add tags to the current task run after its start, when Prefect requests no slots of them any more.

    The server shows them once the task run has ended.
    """
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.tags = sorted({*context.task_run.tags, *tags})
