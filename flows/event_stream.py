"""The events of a flow run as an async iterator."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from ..sandbox.cancellation import run_shielded
from ..sandbox.errors import ConfigurationError
from ..sandbox.queries.records import RlmEvent
from ..sandbox.queries.session import Query
from ..sandbox.result import Failure, Outcome
from .listener import FlowListener

R = TypeVar("R")


class EventStream(Generic[R]):
    """An async iterator of the events of one flow run. The run starts with the loop over the iterator.

    The loop raises the run's error. Leaving the loop early cancels the run.

    Args:
        run: Starts the run with a listener, and returns the flow's value.
    """

    def __init__(self, run: Callable[[FlowListener], Coroutine[Any, Any, R]]) -> None:
        self._run = run
        self._task: asyncio.Task[R] | None = None

    @property
    def is_over(self) -> bool:
        """True if the run has ended, or was cancelled and has removed its sandboxes."""
        return self._task is not None and self._task.done()

    @property
    def result(self) -> R:
        """The value that the flow returned. Raises ConfigurationError if the loop has not ended, or was left early."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            raise ConfigurationError(
                "this stream has no result, because the loop over its events has not ended, or was left early: call "
                "rlm(...) with the same results_path to finish the run"
            )
        return self._task.result()

    async def __aiter__(self) -> AsyncGenerator[RlmEvent]:
        if self._task is not None:
            raise ConfigurationError("a stream can be read once: call stream(...) again for another run")
        events: asyncio.Queue[RlmEvent | None] = asyncio.Queue()
        task = self._task = asyncio.create_task(self._run(_QueueListener(events)))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            if not task.done():
                task.cancel()
                await run_shielded(_wait_for_end(task))


async def _wait_for_end(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # Otherwise asyncio logs that the exception was never retrieved.


class _QueueListener(FlowListener):
    """A listener that queues the events. It adds an "answer" for each question that has a cached result or failed."""

    def __init__(self, events: asyncio.Queue[RlmEvent | None]) -> None:
        self._events = events
        self._answered: set[int] = set()

    def on_rlm_event(self, index: int, event: RlmEvent) -> None:
        if event.kind == "answer":
            self._answered.add(index)
        self._events.put_nowait(event)

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        meta = outcome.meta
        index = meta.index or 0
        if index in self._answered or "query" not in meta.variables:
            return
        model = meta.queries.tree[0].get("model", "") if meta.queries.tree else ""
        query = Query("rlm_query", 1, model, str(meta.variables["query"]))
        if isinstance(outcome, Failure):
            error = f"{type(outcome.error).__name__}: {outcome.error.summary}"
            event = RlmEvent(kind="answer", query=query, index=index, failed=True, error=error)
        else:
            text = str(outcome.outputs.get("answer", ""))
            event = RlmEvent(kind="answer", query=query, index=index, text=text)
        self._events.put_nowait(event)
