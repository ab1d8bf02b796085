"""The step-by-step interpreter for async code: variables of one execution exist in the next."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigurationError, SandboxLost
from ..interpreter import Interpreter
from .base_interpreter import CONTEXT, BaseInterpreter
from .files import download_file, upload_file
from .output_listener import OutputListener

if TYPE_CHECKING:
    from ..queries.recursion import Queries
    from ..requests.execution_request import ExecutionRequest
    from ..result import Result
    from .files import FileData

BUSY = "the state cannot be reset during an execution: wait for its end, or stop it with shutdown()"
OTHER_LOOP = "this interpreter belongs to another event loop: use it within one asyncio.run, or shut it down first"
GONE = "the sandbox is gone: call shutdown() and start() for a new one"


class AsyncInterpreter(BaseInterpreter[Coroutine[Any, Any, "Result"]]):
    """The async interpreter, for one event loop.

    Use it as an async context manager, or call `start`, `execute` and `shutdown`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._shared_queries: Queries | None = None
        self._query_numbers = itertools.count()  # numbers of executions that may query, in the open sandbox
        self._interpreter: Interpreter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the open sandbox

    async def start(self) -> Self:
        await self._start()
        return self

    async def _start(self) -> Interpreter:
        """Return the open interpreter of the sandbox. Open a new one if there is none."""
        if self._interpreter is None or self._interpreter.is_shut_down:  # A failed preparation shuts it down.
            self._interpreter = Interpreter(self._open, timeout=self.timeout, tools=self.tools, prepare=self._prepare)
            self._shared_queries = None
            self._query_numbers = itertools.count()
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():  # Waits would hang, because data arrives on the other loop.
            raise ConfigurationError(OTHER_LOOP)
        interpreter = self._interpreter
        await interpreter.start()
        return interpreter

    async def run(self, request: ExecutionRequest) -> Result:
        if request.on_output is not None:
            request.on_output = OutputListener(request.on_output).hear
        interpreter = await self._start()
        request.queries = self._get_queries(interpreter)
        return await interpreter.run(request)

    async def reset(self) -> None:
        interpreter = self._interpreter
        if interpreter is None:
            return
        if not interpreter.is_alive:
            raise SandboxLost(GONE)
        if interpreter.is_busy(CONTEXT):
            raise ConfigurationError(BUSY)
        await interpreter.forget_context(CONTEXT)

    async def upload(self, path: str, data: FileData) -> None:
        await upload_file((await self._start()).sandbox, path, data)

    async def download(self, path: str) -> bytes:
        return await download_file((await self._start()).sandbox, path)

    def _get_queries(self, interpreter: Interpreter) -> Queries | None:
        """Return the query functions of the next execution: new ones, or those that all executions share."""
        if self._make_queries is None:
            return None
        if self._shared_queries is not None:
            return self._shared_queries
        # Only a recursive model's code shares limits, and its queries are one level deep.
        depth = 1 if self._shares_limits else 0
        queries = self._make_queries(interpreter, depth)
        queries.numbers = (next(self._query_numbers),)  # unique per execution, unlike the seed's index
        if self._shares_limits:
            self._shared_queries = queries
        return queries

    async def shutdown(self) -> None:
        interpreter = self._interpreter
        self._interpreter = None
        if interpreter is not None:
            await interpreter.shutdown()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
