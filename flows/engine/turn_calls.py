"""The calls of a caller's `on_turn`, beside the executions of a flow run."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ...sandbox.queries.records import RlmEvent
from ...sandbox.thread_pool import ThreadPool
from ...tasks.host_tools import Tool


class TurnCalls:
    """The calls of `on_turn`, one after another, in the order in which the turns ended.

    A plain function is called in a thread, so it does not delay the run.
    """

    def __init__(self, on_turn: Tool) -> None:
        self._on_turn = on_turn
        self._turns: asyncio.Queue[RlmEvent | None] = asyncio.Queue()
        self._threads = ThreadPool()

    def add(self, turn: RlmEvent) -> None:
        """Call the function with this turn soon."""
        self._turns.put_nowait(turn)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Call the function with each turn that is added in the context. An error of the function ends the context."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run())
            yield
            self._turns.put_nowait(None)  # This ends the task after the last turn.

    async def _run(self) -> None:
        try:
            while (turn := await self._turns.get()) is not None:
                if inspect.iscoroutinefunction(self._on_turn):
                    await self._on_turn(turn)
                    continue
                value = await self._threads.run_in_thread(partial(self._on_turn, turn))
                if inspect.isawaitable(value):
                    await value
        finally:
            self._threads.close()
