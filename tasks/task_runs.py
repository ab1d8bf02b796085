"""The tags of task runs, which Prefect's tag limits can use, and the state of a cancelled task run."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled
from prefect.tasks import Task
from pydantic import PrivateAttr, field_serializer

P = ParamSpec("P")
R = TypeVar("R")


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

    Without a limit at the start of a flow run, its task runs only show their tags: requests of slots would cost time.
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


class ShownTagsTask(Task[P, R]):
    """A task whose runs have tags on the server from the start, and request no slots of these tags."""

    shown_tags: frozenset[str] = frozenset()

    @classmethod
    def copy_of(cls, base: Task[P, R], shown_tags: Iterable[str]) -> "ShownTagsTask[P, R]":
        """Return a copy of a task that shows these tags."""
        task: ShownTagsTask[P, R] = object.__new__(cls)
        vars(task).update(vars(base), shown_tags=frozenset(shown_tags))
        return task

    async def create_local_run(self, *args: Any, **options: Any) -> TaskRun:
        """Create a run in this process. Prefect requests a slot of each of its tags before it begins."""
        run = await super().create_local_run(*args, **options)
        shown = _ShownTagsRun.model_construct(run.model_fields_set, **dict(run))
        shown._shown_tags = self.shown_tags
        return shown


class _ShownTagsRun(TaskRun):
    """A task run that sends more tags to the server than it has."""

    _shown_tags: frozenset[str] = PrivateAttr(frozenset())

    @field_serializer("tags")
    def _show_tags(self, tags: list[str]) -> list[str]:
        return [*tags, *sorted(self._shown_tags.difference(tags))]


def add_shown_tags() -> None:
    """Give the current task run the tags that it only showed, once Prefect has requested the slots of its tags."""
    context = TaskRunContext.get()
    if context is not None and isinstance(context.task, ShownTagsTask):
        run, shown = context.task_run, context.task.shown_tags
        run.tags = [*run.tags, *sorted(shown.difference(run.tags))]
