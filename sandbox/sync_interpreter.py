"""The synchronous interpreter, for scripts: the same as `interpreter`, for threads that have no event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .cancellation import run_shielded
from .errors import ConfigurationError, SandboxLost, SandboxStartError
from .intake.collected_files import CollectedFiles, check_patterns
from .pipe_transport import PipeTransport
from .protocol import DriverProtocol, resolve_timeout
from .requests.execution_request import convert_variables, encode_request
from .requests.function_code import convert_code
from .sessions.async_interpreter import BUSY, CONTEXT, AsyncInterpreter
from .sessions.files import download_file, upload_file
from .sessions.output_listener import OutputQueue
from .thread_pool import start_thread

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .interpreter import Interpreter
    from .queries.recursion import Queries
    from .result import Result
    from .sandbox_api import Sandbox
    from .sessions.files import FileData
    from .sessions.output_listener import OnOutput

T = TypeVar("T")
FORKED = (
    "the sandbox was opened by another process, of which this one is a fork: shutdown() and start() open one of its own"
)
# A signal that comes just before a wait does not end it, and Ctrl-C is to be heard nonetheless.
MAX_WAIT_SECONDS = 1.0


class _Outcome(Generic[T]):
    """What work on the loop came to, for the one thread that waits for it.

    No `concurrent.futures.Future`: its lock is taken by Python code, so an interrupt of the thread that waits can leave
    it locked for ever, and the loop's thread, which settles it, with it. `on_settle` is called on that thread.
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
    """One event loop in one daemon thread, for every interpreter of the process; made when it is first needed."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begins anew: a fork of this process has the loop, and no thread that runs it."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], output: OutputQueue | None = None) -> T:
        """Runs it on the loop and waits. What interrupts the wait (Ctrl-C) cancels the work, and waits for its end.

        The coroutine is made on the loop's thread: here an interrupt could come before anybody had it. What is put into
        `output` is heard on this thread.
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
            except BaseException as error:  # noqa: BLE001 - also what would end the loop, such as a tool's SystemExit
                outcome.set_error(error)

        def start() -> None:
            if not outcome.is_settled:
                tasks.append(loop.create_task(run_and_settle()))
                tasks[0].add_done_callback(lambda _: settle_unstarted())

        def settle_unstarted() -> None:
            """A task that is cancelled before its first step runs nothing of `run_and_settle`."""
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


run_sync = _BackgroundLoop().run  # of the synchronous face


class SyncInterpreter:
    """Runs code in one sandbox, step by step: names that one execution defines are there in the next.

    A context manager; or `start`, `execute` and `shutdown` by hand. Safe to use from several threads, one execution at
    a time. `timeout` is the default for each execution, in seconds. `tools` are functions of the host, plain or async,
    that the code may call by name; each call has a thread of its own, and 256 run at a time. `make_queries` makes what
    an execution may ask of a model, for code at a depth; None where there is no model. `prepare` is code that runs when
    the sandbox is open, in a process of its own, of which the executions' one is a fork.
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
        self._open = open_sandbox
        self._start_lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._process_id = os.getpid()  # of the process that has opened it
        self._pipe: PipeTransport | None = None  # where the sandbox is on this machine
        self._session: AsyncInterpreter | None = None  # where it is elsewhere

    @property
    def can_query(self) -> bool:
        """Whether its code may ask a model."""
        return self._make_queries is not None

    def start(self) -> Self:
        """Opens the sandbox; the second time does nothing, and after `shutdown` it opens a new one.

        Raises SandboxStartError, QuotaExceeded, ConfigurationError or PrepareError.
        """
        with self._start_lock:
            if self._sandbox is None:
                sandbox, wire = run_sync(self._open_and_attach)
                try:
                    if wire is None:
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
                    else:
                        self._pipe = self._start_pipe(sandbox, wire)
                except BaseException:
                    self._pipe = self._session = None
                    run_sync(sandbox.remove)
                    raise
                self._sandbox, self._process_id = sandbox, os.getpid()
        return self

    def _start_pipe(self, sandbox: Sandbox, wire: tuple[int, int]) -> PipeTransport:
        pipe = PipeTransport(DriverProtocol(sandbox), *wire, run_sync)
        try:
            pipe.start(self._prepare)
        except SandboxStartError:
            again = run_sync(sandbox.attach) if run_sync(sandbox.may_start_again) else None
            if again is None:
                raise
            pipe = PipeTransport(DriverProtocol(sandbox), *again, run_sync)
            pipe.start(self._prepare)
        return pipe

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
    ) -> Result:
        """Runs the code and returns what it submitted. Parameters and errors are those of `Interpreter.execute`.

        `on_output` is called on the thread that waits here; what it raises is logged, and changes nothing else.
        """
        text: str = convert_code(code, self.tools, variables or ())
        output = None if on_output is None else OutputQueue(on_output)
        patterns = check_patterns(collect)
        if self._sandbox is None:
            self.start()
        self._check_process()
        pipe, session = self._pipe, self._session
        if pipe is not None:
            collected = CollectedFiles(patterns, collect_to) if patterns else None
            variables, tools = convert_variables(variables), dict(self.tools)
            seed = None if self._prepare is None else self._prepare.derive_seed(0)  # of the one process
            body = encode_request(text, variables, tools, output_fields, seed=seed, refuse_exit=refuse_exit)
            seconds = resolve_timeout(timeout, self.timeout)
            return pipe.execute(body, variables, seconds, CONTEXT, tools, output_fields, output, collected)
        assert session is not None
        return run_sync(
            lambda: session.execute(
                text,
                variables,
                timeout=timeout,
                output_fields=output_fields,
                on_output=None if output is None else output.put,
                refuse_exit=refuse_exit,
                collect=patterns,
                collect_to=collect_to,
            ),
            output,
        )

    def reset(self) -> None:
        """Forgets all names: the next execution begins in a new process. Files, the volume and the sandbox stay.

        It is no error where there is no state, or where that was lost. Raises ConfigurationError while an execution is
        under way, in another thread or around a tool, and SandboxLost where the sandbox has gone.
        """
        self._check_process()
        pipe, session = self._pipe, self._session
        if session is not None:
            run_sync(session.reset)
        elif pipe is not None and not pipe.forget_context(CONTEXT):
            raise ConfigurationError(BUSY)

    def upload(self, path: str, data: FileData) -> None:
        """Writes a file in the sandbox's working folder, with the directories above it; `path` is relative to that.

        `data` is bytes, text (as UTF-8), or the `pathlib.Path` of a file of this machine, of at most 256 MiB. Raises
        VolumeError, SandboxLost and ConfigurationError, and what `start` raises.
        """
        sandbox = self._get_sandbox()
        run_sync(lambda: upload_file(sandbox, path, data))

    def download(self, path: str) -> bytes:
        """The bytes of a file in the sandbox's working folder, of at most 256 MiB; `path` is relative to that.

        Raises VolumeError for what is no file, a link among it, and SandboxLost, and what `start` raises.
        """
        sandbox = self._get_sandbox()
        return run_sync(lambda: download_file(sandbox, path))

    def _check_process(self) -> None:
        """Raises ConfigurationError in a fork of the process that has opened the sandbox: both would read one wire."""
        if self._sandbox is not None and self._process_id != os.getpid():
            raise ConfigurationError(FORKED)

    def _get_sandbox(self) -> Sandbox:
        self.start()
        self._check_process()
        sandbox = self._sandbox
        if sandbox is None:
            raise SandboxLost("the sandbox was shut down meanwhile: a new one has none of its files")
        return sandbox

    def share_query_limits(self) -> None:
        """Counts further executions as one against the limits on queries, at the depth of a recursive model's code."""
        self._shares_limits = True
        if self._session is not None:
            self._session.share_query_limits()

    def shutdown(self) -> None:
        """Removes the sandbox, whatever it is doing; the second time does nothing.

        In a fork of the process that has opened it the sandbox stays, for that one.
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

    async def _open_and_attach(self) -> tuple[Sandbox, tuple[int, int] | None]:
        sandbox = await self._open()
        try:
            if self._make_queries is not None:
                return sandbox, None  # a query's own code runs while the code that asked it does: on an event loop
            return sandbox, await sandbox.attach()
        except BaseException:
            await run_shielded(sandbox.remove())
            raise


async def _return_sandbox(sandbox: Sandbox) -> Sandbox:
    return sandbox
