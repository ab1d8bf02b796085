"""The base of the synchronous and the async interpreter: their settings, and the documentation of their methods."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..requests.execution_request import ExecutionRequest

if TYPE_CHECKING:
    from ..driver_settings import Preparation
    from ..interpreter import Interpreter
    from ..queries.recursion import Queries
    from ..sandbox_api import Sandbox
    from .files import FileData
    from .output_listener import OnOutput

R = TypeVar("R")  # a result, or a coroutine that returns it

CONTEXT = "main"  # the process that keeps the names of earlier executions


class BaseInterpreter(Generic[R]):
    """An interpreter that runs code in one sandbox, one execution at a time. Names of one execution exist in the next.

    Args:
        open_sandbox: Async function that opens a sandbox.
        timeout: Default time limit of an execution in seconds, or None for no limit. Default: 120 s.
        tools: Functions of the host, plain or async, that the code may call by name. Plain functions run in threads. At
            most 256 calls run at a time. Default: none.
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
        self._open = open_sandbox
        self._make_queries = make_queries
        self._prepare = prepare
        self._shares_limits = False

    @property
    def can_query(self) -> bool:
        """Return True if the code may query a model."""
        return self._make_queries is not None

    def share_query_limits(self) -> None:
        """Make all further executions share one set of query limits, at the depth of a recursive model's code."""
        self._shares_limits = True

    def start(self) -> Any:
        """Open the sandbox if it is not open. After `shutdown` this opens a new one.

        Returns:
            The interpreter itself.

        Raises:
            SandboxStartError: The sandbox could not start.
            QuotaExceeded: The provider's quota is exhausted.
            PrepareError: The `prepare` code failed.
            ConfigurationError: The configuration is wrong, or the sandbox was opened on another event loop.
        """
        raise NotImplementedError

    def reset(self) -> Any:
        """Forget all names: the next execution starts in a new process. Files, the volume and the sandbox remain.

        Resetting a sandbox without state, or with lost state, is not an error.

        Raises:
            ConfigurationError: An execution is running.
            SandboxLost: The sandbox no longer exists.
        """
        raise NotImplementedError

    def upload(self, path: str, data: FileData) -> Any:
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
        raise NotImplementedError

    def download(self, path: str) -> Any:
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
        raise NotImplementedError

    def shutdown(self) -> Any:
        """Remove the sandbox, even if it is running code. A second call does nothing.

        In a fork of the process that opened the sandbox, it stays open for the original process.
        """
        raise NotImplementedError

    def execute(
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
    ) -> R:
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
            on_output: Function called with ("stdout" or "stderr", text) while the code writes. It runs on the calling
                thread; in async code it runs on the event loop and blocks it. If it raises, the error is logged and
                `on_output` is not called again.
            refuse_exit: Treat `exit()` as a failure, even with status 0, and restore SUBMIT and other provided names
                that earlier code has overwritten. Default: False.
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
        request = ExecutionRequest(
            code,
            variables,
            timeout=timeout,
            context=CONTEXT,
            output_fields=output_fields,
            on_output=on_output,
            refuse_exit=refuse_exit,
            collect=collect,
            collect_to=collect_to,
            index=0,
        )
        return self.run(request)

    def run(self, request: ExecutionRequest) -> R:
        """Run a request, and return what its code submitted. Open the sandbox if it is not open."""
        raise NotImplementedError
