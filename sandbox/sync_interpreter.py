"""The synchronous interpreter: `interpreter` for scripts and threads without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .errors import ConfigurationError, SandboxLost, SandboxStartError
from .pipe_transport import PipeTransport
from .protocol import DriverProtocol
from .sessions.async_interpreter import BUSY, AsyncInterpreter
from .sessions.base_interpreter import CONTEXT, BaseInterpreter
from .sessions.files import download_file, upload_file
from .sessions.output_listener import OutputQueue
from .thread_pool import start_thread

if TYPE_CHECKING:
    from .requests.execution_request import ExecutionRequest
    from .result import Result
    from .sandbox_api import Sandbox
    from .sessions.files import FileData

T = TypeVar("T")
FORKED = "the sandbox belongs to the parent of this forked process: call shutdown() and start() for a new one"
# Seconds. The limit bounds the delay of Ctrl-C: a signal that arrives just before a wait does not interrupt the wait.
MAX_WAIT_SECONDS = 1.0


class _Outcome(Generic[T]):
    """The result or error of work on the event loop, for the one thread that waits for it.

    `concurrent.futures.Future` is unsuitable: Python code takes its lock, so an interrupt of the waiting thread can
    leave the lock held for ever and block the loop's thread. `on_settle` is called on the loop's thread.
    """

    def __init__(self, on_settle: Callable[[], None]) -> None:
        self._on_settle = on_settle
        self.is_settled = False
        self._result: T
        self._error: BaseException | None = None
        self._settled = threading.Lock()
        self._settled.acquire()

    def set_result(self, result: T) -> None:
        self._result = result
        self._settle()

    def set_error(self, error: BaseException) -> None:
        self._error = error
        self._settle()

    def _settle(self) -> None:
        self.is_settled = True
        self._settled.release()
        self._on_settle()

    def wait(self) -> None:
        while not self.is_settled:
            self._settled.acquire(timeout=MAX_WAIT_SECONDS)

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result


class _BackgroundLoop:
    """One event loop in a daemon thread, shared by all interpreters of the process and created on first use."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset the loop. A fork of this process has the loop object, but not the thread that runs it."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Callable[[], Awaitable[T]], output: OutputQueue | None = None) -> T:
        """Run the work on the loop and wait. An interrupt of the wait (Ctrl-C) cancels the work and waits for its end.

        The loop's thread creates the coroutine, so an interrupt here cannot leave a coroutine that nothing awaits. The
        calling thread delivers the text in the queue `output`.
        """
        with self._lock:
            if self._loop is None:
                new_loop = asyncio.new_event_loop()
                try:
                    start_thread(new_loop.run_forever, "rlm-batch")
                except SandboxStartError:
                    new_loop.close()
                    raise
                self._loop = new_loop
        loop, tasks = self._loop, list[asyncio.Task[None]]()
        outcome = _Outcome[T](lambda: None if output is None else output.wake())

        async def run_and_settle() -> None:
            try:
                outcome.set_result(await work())
            except BaseException as error:  # noqa: BLE001 - includes a tool's SystemExit, which would end the loop
                outcome.set_error(error)

        def start() -> None:
            if not outcome.is_settled:
                tasks.append(loop.create_task(run_and_settle()))
                tasks[0].add_done_callback(lambda _: settle_unstarted())

        def settle_unstarted() -> None:
            """Settle the outcome of a task that was cancelled before it entered `run_and_settle`."""
            if not outcome.is_settled:
                outcome.set_error(asyncio.CancelledError())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:
                settle_unstarted()

        try:
            loop.call_soon_threadsafe(start)
            while output is not None and not outcome.is_settled:
                output.wait(MAX_WAIT_SECONDS)
            if output is not None:
                output.deliver()
            outcome.wait()
            return outcome.get()
        except BaseException:
            if not outcome.is_settled:
                loop.call_soon_threadsafe(cancel)
                outcome.wait()
            raise


run_sync = _BackgroundLoop().run


class SyncInterpreter(BaseInterpreter["Result"]):
    """The synchronous interpreter. Threads may share it.

    Use it as a context manager, or call `start`, `execute` and `shutdown`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._start_lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._process_id = os.getpid()  # id of the process that opened the sandbox
        self._pipe: PipeTransport | None = None  # wire of a sandbox on this machine that cannot query a model
        self._session: AsyncInterpreter | None = None  # wire of any other sandbox

    def start(self) -> Self:
        """Open the sandbox. A second call does nothing; after `shutdown` it opens a new sandbox.

        Returns:
            The interpreter itself.

        Raises:
            SandboxStartError: The sandbox could not start.
            QuotaExceeded: The provider's quota is exhausted.
            PrepareError: The `prepare` code failed.
            ConfigurationError: The configuration is wrong.
        """
        with self._start_lock:
            if self._sandbox is None:
                sandbox = run_sync(self._open)
                try:
                    # A query's code runs while the asking code runs, which needs an event loop.
                    if self.can_query or not self._start_pipe(sandbox):
                        self._session = AsyncInterpreter(
                            lambda: _return_sandbox(sandbox),
                            timeout=self.timeout,
                            tools=self.tools,
                            make_queries=self._make_queries,
                            prepare=self._prepare,
                        )
                        if self._shares_limits:
                            self._session.share_query_limits()
                        run_sync(self._session.start)
                except BaseException:
                    self._pipe = self._session = None
                    run_sync(sandbox.remove)
                    raise
                self._sandbox, self._process_id = sandbox, os.getpid()
        return self

    def _start_pipe(self, sandbox: Sandbox) -> bool:
        """Start the driver of a sandbox on this machine. Return False for any other sandbox."""
        try:
            self._attach(sandbox)
        except SandboxStartError:
            if not run_sync(sandbox.may_start_again):
                raise
            self._attach(sandbox)
        return self._pipe is not None

    def _attach(self, sandbox: Sandbox) -> None:
        wire = run_sync(sandbox.attach)
        if wire is not None:
            self._pipe = PipeTransport(DriverProtocol(sandbox), *wire, run_sync)
            self._pipe.start(self._prepare)

    def run(self, request: ExecutionRequest) -> Result:
        output: OutputQueue | None = None
        if request.on_output is not None:
            output = OutputQueue(request.on_output)
            request.on_output = output.put
        if self._sandbox is None:
            self.start()
        self._check_process()
        pipe, session = self._pipe, self._session
        if pipe is not None:
            request.complete(self.tools, self.timeout, self._prepare)
            return pipe.execute(request, output)
        assert session is not None
        return run_sync(lambda: session.run(request), output)

    def reset(self) -> None:
        """Forget all names: the next execution starts in a new process. Files, the volume and the sandbox remain.

        Resetting a sandbox without state, or with lost state, is not an error.

        Raises:
            ConfigurationError: An execution is running in another thread, or waits for the calling tool.
            SandboxLost: The sandbox is gone.
        """
        self._check_process()
        pipe, session = self._pipe, self._session
        if session is not None:
            run_sync(session.reset)
        elif pipe is not None and not pipe.forget_context(CONTEXT):
            raise ConfigurationError(BUSY)

    def upload(self, path: str, data: FileData) -> None:
        """Write a file in the sandbox, and the directories above it.

        Args:
            path: Relative to the sandbox's working folder.
            data: Bytes, text (written as UTF-8), or the `pathlib.Path` of a local file; at most 256 MiB.

        Raises:
            VolumeError: The path is invalid, the data is too large, or the file could not be read or written.
            SandboxLost: The sandbox no longer exists.
            ConfigurationError: `data` has another type.
            RlmBatchError: An error of `start`.
        """
        sandbox = self._get_sandbox()
        run_sync(lambda: upload_file(sandbox, path, data))

    def download(self, path: str) -> bytes:
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
        sandbox = self._get_sandbox()
        return run_sync(lambda: download_file(sandbox, path))

    def _check_process(self) -> None:
        """Raise ConfigurationError in a fork of the process that opened the sandbox: both would read the connection."""
        if self._sandbox is not None and self._process_id != os.getpid():
            raise ConfigurationError(FORKED)

    def _get_sandbox(self) -> Sandbox:
        self.start()
        self._check_process()
        sandbox = self._sandbox
        if sandbox is None:
            raise SandboxLost("the sandbox was shut down meanwhile, and a new one has none of its files")
        return sandbox

    def share_query_limits(self) -> None:
        """Make all further executions share one set of query limits, at the depth of a recursive model's code."""
        self._shares_limits = True
        if self._session is not None:
            self._session.share_query_limits()

    def shutdown(self) -> None:
        """Remove the sandbox, even if it is running code. A second call does nothing.

        In a fork of the process that opened the sandbox, it stays open for the original process.
        """
        if self._process_id != os.getpid():
            self._sandbox = self._pipe = self._session = None
            return
        with self._start_lock:
            sandbox, self._sandbox = self._sandbox, None
            pipe, self._pipe = self._pipe, None
            session, self._session = self._session, None
        if pipe is not None:
            pipe.close()
        if session is not None:
            run_sync(session.shutdown)
        elif sandbox is not None:
            run_sync(sandbox.remove)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()


async def _return_sandbox(sandbox: Sandbox) -> Sandbox:
    return sandbox
