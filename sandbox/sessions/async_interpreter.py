"""The step-by-step interpreter for async code: variables of one execution exist in the next."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigurationError, SandboxLost
from ..interpreter import Interpreter
from ..requests.execution_request import check_patterns
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
BUSY = "the state cannot be reset during an execution: wait for its end, or stop it with shutdown()"
OTHER_LOOP = "this interpreter belongs to another event loop: use it within one asyncio.run, or shut it down first"
GONE = "the sandbox is gone: call shutdown() and start() for a new one"


class AsyncInterpreter:
    """An interpreter that runs code in one sandbox, one execution at a time, on one event loop.

    Use it as an async context manager, or call `start`, `execute` and `shutdown`.

    Args:
        open_sandbox: Async function that opens a sandbox.
        timeout: Default time limit of an execution in seconds, or None for no limit. Default: 120 s.
        tools: Host functions that the code may call, by name. Default None: no functions.
        make_queries: Function of an interpreter and a depth that returns the query functions of an execution. Default
            None: the code cannot query a model.
        prepare: Code that runs when the sandbox opens. The executions run in a fork of the process that ran it. Default
            None: no code.
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
        self._asking_numbers = itertools.count()  # numbers of executions with queries, in the open sandbox
        self._open = open_sandbox
        self._interpreter: Interpreter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the open sandbox

    async def start(self) -> Self:
        """Open the sandbox if it is not open. After `shutdown` this opens a new one.

        Returns:
            The interpreter itself.

        Raises:
            SandboxStartError: The sandbox could not start.
            QuotaExceeded: The provider's quota is exhausted.
            PrepareError: The `prepare` code failed.
            ConfigurationError: The configuration is wrong, or the sandbox was opened on another event loop.
        """
        await self._start()
        return self

    async def _start(self) -> Interpreter:
        if self._interpreter is None or self._interpreter.is_shut_down:  # after a failed preparation, too
            self._interpreter = Interpreter(self._open, timeout=self.timeout, tools=self.tools, prepare=self._prepare)
            self._shared_queries, self._asking_numbers = None, itertools.count()
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():  # waits would hang: data arrives on the other loop
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
        """Run the code and return what it submitted. Open the sandbox if it is not open.

        Files are collected even if the execution failed, as long as the sandbox exists: at most 10,000 files and 1 GiB
        in total, within 600 s. `meta.collected` has their paths, and `meta.not_collected` the reason for each missing
        file.

        Args:
            code: Python text, or a function. A function's source is run with `variables` as its arguments, and its
                return value is submitted.
            variables: JSON values, available as global names. Default: none.
            timeout: Seconds. Default: the interpreter's `timeout`.
            output_fields: The fields that SUBMIT accepts, in order: dicts with `name` and an optional `type` (str, int,
                float, bool, list, dict). Default: any fields.
            on_output: Function called with ("stdout" or "stderr", text) while the code writes. It runs
                on the event loop and blocks it. If it raises, the error is logged and `on_output` is not called again.
            refuse_exit: Treat `exit()` as a failure, even with status 0, and in a context put back what
                code has changed of the names that it found. Default: False.
            collect: Patterns of files in the working folder (`*.png`, `out/model.bin`, `out/**`). Files that the code
                created or changed are copied to the host, with their directories. Default: none.
            collect_to: Target directory; existing files of the same name are replaced. By default a new temporary
                directory, which the caller should remove.

        Returns:
            The submitted fields, with the metadata in `meta`.

        Raises:
            CodeError: The code raised an exception, did not compile or crashed.
            ExecutionTimeout: The code exceeded its timeout.
            SubmitError: SUBMIT received values that it cannot return.
            StateLost: The process with the state of earlier executions has ended.
            SandboxLost: The sandbox was lost before the code was sent.
            OutcomeUnknown: The sandbox was lost while the code may have run.
            ConfigurationError: A variable is not JSON, or a tool uses the interpreter that waits for it.
            RlmBatchError: An error of `start`, if this call opens the sandbox.
        """
        listener = None if on_output is None else OutputListener(on_output)
        patterns = check_patterns(collect)  # raises before a sandbox opens
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
        """Delete all variables: the next execution begins in a new process. Files, the volume and the sandbox stay.

        Resetting an interpreter without state, or with lost state, is not an error.

        Raises:
            ConfigurationError: An execution is running.
            SandboxLost: The sandbox no longer exists.
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
        """Write a file in the sandbox's working folder, and create its missing directories. Open the sandbox if needed.

        Args:
            path: Path relative to the working folder.
            data: Bytes, text (sent as UTF-8) or the `pathlib.Path` of a local file, at most 256 MiB.

        Raises:
            VolumeError: The path is invalid, the data is too large, or the file could not be read or written.
            SandboxLost: The sandbox no longer exists.
            ConfigurationError: `data` has another type.
            RlmBatchError: An error of `start`.
        """
        await upload_file((await self._start()).sandbox, path, data)

    async def download(self, path: str) -> bytes:
        """Return the bytes of a file in the sandbox's working folder. Open the sandbox if needed.

        Args:
            path: Path relative to the working folder. The file may have at most 256 MiB.

        Returns:
            The file's content.

        Raises:
            VolumeError: The path is not a regular file (links are refused), or the file is too large.
            SandboxLost: The sandbox no longer exists.
            RlmBatchError: An error of `start`.
        """
        return await download_file((await self._start()).sandbox, path)

    def share_query_limits(self) -> None:
        """Make all further executions share one set of query limits, at the depth of a recursive model's code."""
        self._shares_limits = True

    def _get_queries(self, interpreter: Interpreter) -> Queries | None:
        if self._make_queries is None:
            return None
        if self._shares_limits and self._shared_queries is not None:
            return self._shared_queries
        queries = self._make_queries(interpreter, int(self._shares_limits))
        queries.numbers = (next(self._asking_numbers),)  # unique per execution, unlike the seed's index
        if self._shares_limits:
            self._shared_queries = queries
        return queries

    async def shutdown(self) -> None:
        """Delete the sandbox, even while it runs code. A second call does nothing."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.shutdown()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
