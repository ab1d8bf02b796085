"""The tags of our task runs, by which Prefect's own tag limits can hold them."""

from collections.abc import Iterable
from contextlib import suppress

import httpx
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound


def build_tags(provider: str) -> set[str]:
    """The tags of an execution's task run on the provider of that name."""
    return {"sandbox", f"sandbox:{provider}"}


async def has_tag_limit(tags: Iterable[str]) -> bool:
    """Whether the Prefect server has a limit on one of these tags; True where it does not say.

    A task run that begins with tags asks for a slot of each, whether there is a limit or not. A server on SQLite
    refuses that whenever it is just writing, and then no task run of this process begins for the next two seconds. So
    where there is no limit when a flow run begins, its task runs begin without tags, and are given them by `add_tags`.
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


def add_tags(tags: Iterable[str]) -> None:
    """Adds the tags to the task run that this is called in; the server has them with its next state."""
    context = TaskRunContext.get()
    if context is not None:
        run = context.task_run
        run.tags = [*run.tags, *sorted(set(tags).difference(run.tags))]
