"""The interpreter for async code that works step by step: names that one execution defines are there in the next."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigurationError, SandboxLost
from ..intake.collected_files import check_patterns
from ..interpreter import Interpreter
from .files import download_file, upload_file
from .output_listener import OutputListener

if TYPE_CHECKING:
    from ..driver_settings import Preparation
    from ..queries.recursion import Queries
    from ..result import Result
    from ..sandbox_api import Sandbox
    from .files import FileData
    from .output_listener import OnOutput

CONTEXT = "main"
BUSY = (
    "the state cannot be reset while an execution is under way: wait for its end, or end it (a timeout, Ctrl-C, "
    "shutdown())"
)
OTHER_LOOP = "this interpreter was started on another event loop: use it within one asyncio.run, or shut it down first"
GONE = "the sandbox has gone: shutdown() and start() open a new one"


class AsyncInterpreter:
    """Runs code in one sandbox, step by step, for one event loop; executions take turns.

    An async context manager; or `start`, `execute` and `shutdown` by hand. The parameters are those of
    `SyncInterpreter`.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        make_queries: Callable[[Interpreter, int], Queries] | None = None,
        prepare: Preparation | None = None,
    ) -> None:
        self.timeout = timeout
        self.tools: dict[str, Callable[..., Any]] = {} if tools is None else tools
        self._make_queries = make_queries
        self._prepare = prepare
        self._shares_limits = False
        self._shared_queries: Queries | None = None
        self._asking_numbers = itertools.count()  # of executions that may ask, in the sandbox that is open
        self._open = open_sandbox
        self._interpreter: Interpreter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that it was opened on

    async def start(self) -> Self:
        """Opens the sandbox; the second time does nothing, and after `shutdown` it opens a new one.

        Raises SandboxStartError, QuotaExceeded, PrepareError, or ConfigurationError, as on another event loop than that
        on which it was opened.
        """
        await self._start()
        return self

    async def _start(self) -> Interpreter:
        if self._interpreter is None or self._interpreter.is_shut_down:  # as it is where it could not be prepared
            self._interpreter = Interpreter(self._open, timeout=self.timeout, tools=self.tools, prepare=self._prepare)
            self._shared_queries, self._asking_numbers = None, itertools.count()
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():  # it would wait there for what comes on the other
            raise ConfigurationError(OTHER_LOOP)
        interpreter = self._interpreter
        await interpreter.start()
        return interpreter

    async def execute(
        self,
        code: str | Callable[..., object],
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        output_fields: list[dict[str, str]] | None = None,
        on_output: OnOutput | None = None,
        refuse_exit: bool = False,
        collect: Sequence[str] | None = None,
        collect_to: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Runs the code and returns what it submitted. Parameters and errors are those of `Interpreter.execute`.

        `on_output` is called on the event loop, which it keeps from everything else meanwhile; what it raises is
        logged, and changes nothing else.
        """
        listener = None if on_output is None else OutputListener(on_output)
        patterns = check_patterns(collect)  # before anything is opened
        interpreter = await self._start()
        return await interpreter.execute(
            code,
            variables,
            timeout=timeout,
            context=CONTEXT,
            output_fields=output_fields,
            on_output=None if listener is None else listener.hear,
            queries=self._get_queries(interpreter),
            index=0,
            refuse_exit=refuse_exit,
            collect=patterns,
            collect_to=collect_to,
        )

    async def reset(self) -> None:
        """Forgets all names: the next execution begins in a new process. Files, the volume and the sandbox stay.

        It is no error where there is no state, or where that was lost. Raises ConfigurationError while an execution is
        under way, and SandboxLost where the sandbox has gone.
        """
        interpreter = self._interpreter
        if interpreter is None:
            return
        if not interpreter.is_alive:
            raise SandboxLost(GONE)
        if interpreter.is_busy(CONTEXT):
            raise ConfigurationError(BUSY)
        await interpreter.forget_context(CONTEXT)

    async def upload(self, path: str, data: FileData) -> None:
        """Writes a file in the sandbox's working folder, with the directories above it; `path` is relative to that.

        `data` is bytes, text (as UTF-8), or the `pathlib.Path` of a file of this machine, of at most 256 MiB. Raises
        VolumeError, SandboxLost and ConfigurationError, and what `start` raises.
        """
        await upload_file((await self._start()).sandbox, path, data)

    async def download(self, path: str) -> bytes:
        """The bytes of a file in the sandbox's working folder, of at most 256 MiB; `path` is relative to that.

        Raises VolumeError for what is no file, a link among it, and SandboxLost, and what `start` raises.
        """
        return await download_file((await self._start()).sandbox, path)

    def share_query_limits(self) -> None:
        """Counts further executions as one against the limits on queries, at the depth of a recursive model's code."""
        self._shares_limits = True

    def _get_queries(self, interpreter: Interpreter) -> Queries | None:
        if self._make_queries is None:
            return None
        if self._shares_limits and self._shared_queries is not None:
            return self._shared_queries
        queries = self._make_queries(interpreter, int(self._shares_limits))
        queries.numbers = (next(self._asking_numbers),)  # unlike its seed, which is of the one process
        if self._shares_limits:
            self._shared_queries = queries
        return queries

    async def shutdown(self) -> None:
        """Removes the sandbox, whatever it is doing; the second time does nothing."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.shutdown()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
