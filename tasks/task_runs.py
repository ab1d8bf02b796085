"""The tags of task runs, which Prefect's tag limits can use, and the state of a cancelled task run."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec

import httpx
from prefect.client.orchestration import get_client
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

    A task run that starts with tags requests a slot of each, even without a limit, and then every five seconds. A
    server on SQLite refuses the request while it is writing, and then no task run of this process starts for two to
    seven seconds. So without a limit at the start of a flow run, its task runs have no tags.
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
