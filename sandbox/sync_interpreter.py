"""The synchronous interpreter: `interpreter` for scripts and threads without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from .errors import ConfigurationError, SandboxStartError
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


class _BackgroundLoop:
    """One event loop in a daemon thread, shared by all interpreters of the process and created on first use."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset the loop, because a fork of this process does not have the thread that runs it."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    start_thread(loop.run_forever, "rlm-batch")
                except SandboxStartError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def run(self, work: Callable[[], Awaitable[T]], output: OutputQueue | None = None) -> T:
        """Run the work on the loop and wait. An interrupt of the wait (Ctrl-C) cancels the work and waits for its end.

        The calling thread delivers the text in the queue `output`. The wait polls: an interrupt can leave a lock of
        `concurrent.futures`, which is Python code, held for ever, and so block the loop's thread.
        """
        loop = self._get_loop()
        if output is None:
            output = OutputQueue()
        tasks: list[asyncio.Task[tuple[Any, BaseException | None]]] = []  # the task, once it has started
        has_cancelled = False

        async def run_work() -> tuple[Any, BaseException | None]:
            try:
                return await work(), None
            except BaseException as error:  # noqa: BLE001 - a tool's SystemExit in a task would end the loop
                return None, error

        def start() -> None:
            task = loop.create_task(run_work())
            task.add_done_callback(lambda _: output.wake())
            tasks.append(task)

        def cancel() -> None:
            nonlocal has_cancelled
            for task in tasks:
                task.cancel()
            has_cancelled = True

        try:
            loop.call_soon_threadsafe(start)
            while not tasks or not tasks[0].done():
                output.wait(MAX_WAIT_SECONDS)
            output.deliver()
        except BaseException:
            loop.call_soon_threadsafe(cancel)  # `start` has run before it, or was never scheduled.
            while not has_cancelled or not all(task.done() for task in tasks):
                time.sleep(0.01)
            raise
        result, error = tasks[0].result()
        if error is not None:
            raise error
        return cast("T", result)


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
        # An open sandbox has one of these: a pipe if it is on this machine and cannot query a model, or else a session.
        self._pipe: PipeTransport | None = None
        self._session: AsyncInterpreter | None = None

    def start(self) -> Self:
        self._start()
        return self

    def _start(self) -> Sandbox:
        """Open the sandbox if it is not open, and return it.

        Raise ConfigurationError in a fork of the process that opened the sandbox: both would read the connection.
        """
        with self._start_lock:
            if self._sandbox is None:
                sandbox = run_sync(self._open)
                try:
                    self._start_driver(sandbox)
                except BaseException:
                    self._pipe = self._session = None
                    run_sync(sandbox.remove)
                    raise
                self._sandbox = sandbox
                self._process_id = os.getpid()
            if self._process_id != os.getpid():
                raise ConfigurationError(FORKED)
            return self._sandbox

    def _start_driver(self, sandbox: Sandbox) -> None:
        """Start the driver over a pipe, or else with an asynchronous interpreter on the background's event loop."""
        # Code that answers a query runs beside the code that asks. Only a session can do that.
        descriptors = None if self.can_query else run_sync(sandbox.attach)
        if descriptors is not None:
            self._pipe = PipeTransport(DriverProtocol(sandbox), *descriptors, run_sync)
            self._pipe.start(self._prepare)
            return
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

    def run(self, request: ExecutionRequest) -> Result:
        output: OutputQueue | None = None
        if request.on_output is not None:
            output = OutputQueue(request.on_output)
            request.on_output = output.put
        self._start()
        pipe = self._pipe  # Another thread may shut the interpreter down.
        if pipe is not None:
            request.complete(self.tools, self.timeout, self._prepare)
            return pipe.execute(request, output)
        session = self._session
        assert session is not None
        return run_sync(lambda: session.run(request), output)

    def reset(self) -> None:
        if self._sandbox is None:
            return
        self._start()
        pipe = self._pipe
        session = self._session
        if session is not None:
            run_sync(session.reset)
        elif pipe is not None and not pipe.forget_context(CONTEXT):
            raise ConfigurationError(BUSY)

    def upload(self, path: str, data: FileData) -> None:
        sandbox = self._start()
        run_sync(lambda: upload_file(sandbox, path, data))

    def download(self, path: str) -> bytes:
        sandbox = self._start()
        return run_sync(lambda: download_file(sandbox, path))

    def share_query_limits(self) -> None:
        """Make all further executions share one set of query limits, as the turns of a recursive model do."""
        self._shares_limits = True
        if self._session is not None:
            self._session.share_query_limits()

    def shutdown(self) -> None:
        if self._process_id != os.getpid():  # The sandbox belongs to the parent of this fork.
            self._sandbox = self._pipe = self._session = None
            return
        with self._start_lock:
            sandbox = self._sandbox
            pipe = self._pipe
            session = self._session
            self._sandbox = self._pipe = self._session = None
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
