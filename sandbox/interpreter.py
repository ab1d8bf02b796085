"""The interpreter: the host's handle on the Python inside one open sandbox.

It is async. `sync_interpreter` has the synchronous version for scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .cancellation import run_shielded
from .errors import ConfigurationError, RlmBatchError, SandboxLost, SandboxStartError
from .intake.calls import Call, CallLimit, CallQueue, running_call
from .intake.collected_files import CollectedFiles
from .protocol import (
    REENTERED,
    START_TIMEOUT_SECONDS,
    DriverProtocol,
    PendingExecution,
    encode_exception,
    encode_value,
)
from .requests.execution_request import ExecutionRequest
from .thread_pool import ThreadPool
from .wire.names import OWN_FILE_PREFIX

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .result import Result
    from .sandbox_api import Channel, Sandbox


log = logging.getLogger("rlm_batch.sandbox")
REFUSED_GRACE_SECONDS = 3.0  # seconds to send the cancellation of a refused execution

# The interpreters and contexts that wait for the tool running in this task or thread.
_waiting_for_tool: contextvars.ContextVar[tuple[tuple[Interpreter, str | None], ...]]
_waiting_for_tool = contextvars.ContextVar("_waiting_for_tool", default=())


class Interpreter:
    """A handle that runs code in one sandbox. `start` opens the sandbox, `shutdown` removes it.

    Executions may run concurrently, but executions of one context run one after another. At most 256 tool calls of an
    execution run at a time; the others wait.

    Args:
        open_sandbox: Opens the sandbox; called once.
        timeout: Default for each execution, in seconds; None means no limit.
        tools: Functions of the host that the code may call by name. Plain functions run in threads, async ones on the
            event loop.
        prepare: Code that runs before the first execution. Executions run in forks of its process.

    Attributes:
        on_start: Called when the sandbox is open and its driver ready. The first execution may have been sent by then.
        start_error: The error of a failed start.
        on_prepare_output: Receives the output of `prepare`, like `on_output` of `execute`.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        prepare: Preparation | None = None,
    ) -> None:
        self.timeout = timeout
        self._prepare = prepare
        self.tools: dict[str, Callable[..., Any]] = {} if tools is None else tools
        self._open = open_sandbox
        self._protocol: DriverProtocol | None = None
        self._channel: Channel | None = None
        self._context_locks: dict[str, asyncio.Lock] = {}
        self._start_lock = asyncio.Lock()
        self._refresh_lock = asyncio.Lock()
        self._waiters: dict[int, asyncio.Event] = {}  # keys are execution numbers; 0 is the driver's start
        self._calls: dict[int, CallQueue] = {}
        # A call holds the lock from the encoding of its answer until it is sent: the host has one answer as JSON.
        self._answer_lock = asyncio.Lock()
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._sent_at = self._received_at = 0.0
        self._threads = ThreadPool()
        self._execution_numbers = itertools.count()
        self.on_start: Callable[[], None] | None = None
        self.on_prepare_output: Callable[[str, str], None] | None = None
        self.start_error: BaseException | None = None

    @property
    def sandbox(self) -> Sandbox:
        """Return the open sandbox. Raise SandboxLost if no sandbox is open."""
        if self._protocol is None:
            raise SandboxLost("no sandbox is open: start the interpreter first")
        return self._protocol.sandbox

    @property
    def is_alive(self) -> bool:
        """Return True if the next execution can be sent to this sandbox."""
        protocol = self._protocol
        return self._channel is not None and protocol is not None and not (protocol.closed_reason or protocol.is_spent)

    @property
    def is_shut_down(self) -> bool:
        """Return True if the interpreter was shut down and cannot be used again."""
        return self._is_shut_down

    # -- opening and closing

    async def start(self) -> None:
        """Open the sandbox, start the driver and run the preparation. A second call does nothing.

        Raises:
            SandboxStartError, QuotaExceeded, ConfigurationError, PrepareError: The start failed; the sandbox was
            removed.
        """
        await self._start(lambda _: b"")

    async def _start(self, encode_more: Callable[[DriverProtocol], bytes]) -> None:
        """Start the sandbox; `encode_more` returns bytes to send together with the driver's settings."""
        async with self._start_lock:
            if self._channel is not None:
                return
            if self._is_shut_down:
                raise SandboxLost("this interpreter was shut down: create a new one")
            try:
                await self._open_and_start(encode_more)
            except BaseException as error:
                self.start_error = error
                raise
            if self.on_start is not None:
                self.on_start()
            if self._prepare is not None:
                await self._wait_until_prepared()

    async def _wait_until_prepared(self) -> None:
        """Wait for the end of the preparation. If it failed, remove the sandbox and raise its error."""
        protocol, channel = self._protocol, self._channel
        try:
            if protocol is None or channel is None or protocol.preparation is None:
                raise SandboxLost("the sandbox was shut down before it was prepared: run the code in a new one")
            await self._wait(protocol, channel, protocol.preparation, b"")
            protocol.check_prepared()
        except BaseException:
            await self.shutdown()
            raise

    async def _open_and_start(self, encode_more: Callable[[DriverProtocol], bytes]) -> None:
        sandbox = await self._open()
        if self._is_shut_down:
            await run_shielded(sandbox.remove())
            raise SandboxLost("this interpreter was shut down while its sandbox was being opened")
        try:
            try:
                await self._start_driver(sandbox, encode_more)
            except SandboxStartError:
                if not await sandbox.may_start_again():
                    raise
                await self._start_driver(sandbox, encode_more)
        except BaseException as error:
            self._close("its driver did not start")
            self._protocol = self._channel = None
            self._waiters.clear()
            await run_shielded(sandbox.remove())
            if isinstance(error, RlmBatchError) or not isinstance(error, Exception):
                raise
            raise SandboxStartError(f"the driver did not start in sandbox {sandbox.id}: {error}") from error

    async def _start_driver(self, sandbox: Sandbox, encode_more: Callable[[DriverProtocol], bytes]) -> None:
        protocol = self._protocol = DriverProtocol(sandbox)
        self._waiters.clear()
        loop = asyncio.get_running_loop()
        ready = self._waiters[0] = asyncio.Event()
        self._sent_at = self._received_at = loop.time()
        channel = self._channel = await sandbox.connect(self._receive, self._close)
        is_sent = False
        first = protocol.encode_start()
        if self._prepare is None:
            first += encode_more(protocol)
        else:  # An execution sent now would wait in the driver until the preparation ends.
            preparation, frame = protocol.add_preparation(self._prepare, self.on_prepare_output)
            self._waiters[preparation.id] = asyncio.Event()
            first += frame
        try:
            await channel.send(first)
            is_sent = self._prepare is None
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                await ready.wait()
        except SandboxLost:
            if protocol.is_ready:  # The driver started, but the frame after its settings was not delivered.
                raise
            protocol.close_at_hangup()
        except TimeoutError:
            pass
        protocol.check_ready(is_sent)
        settings = sandbox.settings
        if settings.heartbeat is not None:
            heartbeat = self._send_heartbeats(protocol, channel, settings.heartbeat, settings.silence)
            self._heartbeat = asyncio.create_task(heartbeat)

    async def shutdown(self) -> None:
        """Remove the sandbox. Running executions fail. A second call does nothing."""
        sandbox = self._disconnect()
        if sandbox is not None:
            await run_shielded(sandbox.remove())

    async def keep(self, until: float, execution: int | None = None) -> None:
        """Shut down as `shutdown` does, but leave the sandbox open until a time, in epoch seconds.

        The provider lists the sandbox with the number of its failed `execution`.
        """
        sandbox = self._disconnect()
        if sandbox is None:
            return
        try:
            await run_shielded(sandbox.keep(until, execution))
        except RlmBatchError as error:
            log.warning("sandbox %s could not be kept, and is removed: %s", sandbox.id, error.summary)
            await run_shielded(sandbox.remove())

    def _disconnect(self) -> Sandbox | None:
        """Forget the sandbox and return it; None if no sandbox is open."""
        self._is_shut_down = True
        self._close("it was shut down")
        self._threads.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        protocol, self._protocol = self._protocol, None
        return None if protocol is None else protocol.sandbox

    async def __aenter__(self) -> Interpreter:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- executing

    async def execute(
        self, code: str | Callable[..., object], variables: dict[str, Any] | None = None, **settings: Any
    ) -> Result:
        """Run code in the sandbox and return what it submitted: `run` for a request with these fields."""
        return await self.run(ExecutionRequest(code, variables, **settings))

    async def run(self, request: ExecutionRequest) -> Result:
        """Run a request in the sandbox and return what its code submitted. Open the sandbox if it is not open.

        The limits on collected files are 1 GiB, 10,000 files and 600 seconds after the execution's timeout. Files are
        collected even if the execution failed, as long as the sandbox exists. A missing file is not an error:
        `meta.collected` has the paths, `meta.not_collected` the reason for each missing file.

        Raises:
            CodeError, ExecutionTimeout, SubmitError, StateLost: The code failed. These errors have `meta`.
            SandboxStartError, PrepareError, SandboxLost, OutcomeUnknown: The sandbox failed.
            ConfigurationError: A variable is not JSON, or a tool uses the context that waits for it.
        """
        if request.context is not None and (self, request.context) in _waiting_for_tool.get():
            raise ConfigurationError(REENTERED)
        if request.index is None and self._prepare is not None:
            request.index = next(self._execution_numbers)
        request.complete(self.tools, self.timeout, self._prepare)
        large = {name: value for name, value in (request.encoded or {}).items() if value.is_large}
        paths = {name: f"{OWN_FILE_PREFIX}-{uuid.uuid4().hex}.json" for name in large}
        body = request.encode(paths)
        for name, path in paths.items():
            await self.upload(path, await asyncio.to_thread(large[name].encode_file, name))
        if request.context is None:
            return await self._run_alone(request, body)
        async with self._context_locks.setdefault(request.context, asyncio.Lock()):
            return await self._run_alone(request, body)

    async def _run_alone(self, request: ExecutionRequest, body: list[bytes]) -> Result:
        """Send a request whose context runs nothing else, and return its result."""
        collected = CollectedFiles(list(request.collect), request.collect_to) if request.collect else None
        queries = request.queries
        pending: PendingExecution | None = None
        sent_by: DriverProtocol | None = None

        def encode_execution(protocol: DriverProtocol) -> bytes:
            nonlocal pending, sent_by
            sent_by = protocol
            if queries is not None and queries.is_top_level:
                queries.session.set_deadline(request.timeout)
            pending, frame = protocol.add_execution(request, body, collected)
            self._waiters[pending.id] = asyncio.Event()
            return b"".join(frame)

        # Sending the first execution with the driver's settings saves a call to the provider and a round trip.
        await self._start(encode_execution)
        # If the execution was sent at the start, it may have run, even if the sandbox is gone now.
        protocol, channel, frame = sent_by or self._protocol, self._channel, b""
        if protocol is None or channel is None:
            raise SandboxLost("the sandbox was shut down before the code was sent: run it in a new one")
        if pending is None:
            # An execution that starts during the refresh could lose the files it saves.
            async with self._refresh_lock:
                if not protocol.pending:
                    await protocol.sandbox.refresh_volume()
                frame = encode_execution(protocol)
        elif queries is not None and queries.is_top_level:
            queries.session.set_deadline(request.timeout)  # from here, without the driver's start
        assert pending is not None
        await self._wait(protocol, channel, pending, frame)
        if queries is not None:
            pending.queries = queries.session.summarize()
            if queries.is_top_level:
                pending.listener_error = pending.listener_error or queries.session.listener_error
        if collected is not None:
            pending.end_collection()
            await run_shielded(asyncio.to_thread(collected.finish))
        return protocol.take_result(pending)

    async def _wait(self, protocol: DriverProtocol, channel: Channel, pending: PendingExecution, frame: bytes) -> None:
        """Send the frame, unless it is empty, and wait for the execution's end."""
        ended = self._waiters[pending.id]
        try:
            if frame:
                await self._send(channel, frame)
            async with asyncio.timeout(protocol.compute_answer_timeout(pending)):
                await ended.wait()
            if pending.refusal and not protocol.closed_reason:
                await self._cancel_refused(protocol, channel, pending)
        except TimeoutError:
            protocol.close_at_silence(pending)
            self._wake_all()
        except asyncio.CancelledError:
            if pending.collected is not None:
                pending.collected.end()  # on the event loop, which also calls `take`
                await run_shielded(asyncio.to_thread(pending.collected.finish))
            if not protocol.closed_reason and not pending.is_over:
                with contextlib.suppress(SandboxLost):
                    await run_shielded(self._send(channel, protocol.encode_cancel(pending)))
            raise
        finally:
            self._waiters.pop(pending.id, None)
            calls = self._calls.pop(pending.id, None)
            if calls is not None:
                calls.cancel()

    async def _cancel_refused(self, protocol: DriverProtocol, channel: Channel, pending: PendingExecution) -> None:
        """Tell the driver to end the execution. Wait at most `REFUSED_GRACE_SECONDS`."""
        protocol.pending.pop(pending.id, None)
        sending = asyncio.create_task(self._send(channel, protocol.encode_cancel(pending)))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([sending], timeout=REFUSED_GRACE_SECONDS)

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox (see `Sandbox.upload`). Open the sandbox if it is not open."""
        await self.start()
        if self._protocol is None:
            raise SandboxLost("the sandbox was shut down before the file was sent: run the code in a new one")
        await self._protocol.sandbox.upload(path, data)

    def is_busy(self, context: str) -> bool:
        """Return True if an execution of that context is running."""
        return context in self._context_locks and self._context_locks[context].locked()

    async def forget_context(self, context: str) -> None:
        """End a context. The next execution under its name starts fresh."""
        protocol, channel = self._protocol, self._channel
        if protocol is not None and channel is not None and not protocol.closed_reason:
            await self._send(channel, protocol.encode_forget(context))

    # -- the wire

    async def _send(self, channel: Channel, frame: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await channel.send(frame)

    def _receive(self, data: bytes) -> None:
        protocol = self._protocol
        if protocol is None:
            return
        self._received_at = asyncio.get_running_loop().time()
        events = protocol.receive(data)
        if protocol.closed_reason:
            self._wake_all()
        if protocol.is_ready and 0 in self._waiters:
            self._waiters.pop(0).set()
        for pending, frame in events:
            if pending.end is None and not pending.refusal and pending.id in self._waiters:
                calls = self._calls.get(pending.id)
                if calls is None:
                    answer = partial(self._call_tool, protocol, pending)
                    calls = self._calls[pending.id] = CallQueue(answer, pending.caller_context)
                pending.refusal = calls.add(Call(*frame))
            if pending.end is not None or pending.refusal:
                waiter = self._waiters.get(pending.id)
                if waiter is not None:
                    waiter.set()

    async def _call_tool(
        self, protocol: DriverProtocol, pending: PendingExecution, call: Call, limit: CallLimit
    ) -> None:
        """Call a tool for the code and send its return value or exception."""
        # The tool's thread gets a copy of this context variable.
        _waiting_for_tool.set((*_waiting_for_tool.get(), (self, pending.request.context)))
        running_call.set(call)
        async with contextlib.AsyncExitStack() as answering:
            try:
                tool = pending.bind_tool(call)
                value = tool() if inspect.iscoroutinefunction(tool) else await self._threads.run_in_thread(tool)
                if inspect.isawaitable(value):
                    value = await value
                await answering.enter_async_context(self._answer_lock)
                body = encode_value(call.header["name"], value)
            except asyncio.CancelledError as error:
                if pending.end is not None or pending.refusal or pending.id not in protocol.pending:
                    raise  # The execution has ended or is about to, so the reply is not needed.
                body = encode_exception(error)
            except BaseException as error:  # noqa: BLE001 - the code that called the tool handles it
                body = encode_exception(error)
            if self._channel is not None and not protocol.closed_reason:
                with contextlib.suppress(SandboxLost):  # The execution itself reports the loss.
                    await self._send(self._channel, protocol.encode_reply(call, body))

    def _close(self, reason: str) -> None:
        """Record why the connection ended, and wake everything that waits for it."""
        if self._protocol is not None:
            self._protocol.close(reason)
            self._wake_all()

    def _wake_all(self) -> None:
        for waiter in self._waiters.values():
            waiter.set()

    async def _send_heartbeats(
        self, protocol: DriverProtocol, channel: Channel, interval: float, silence: float
    ) -> None:
        loop = asyncio.get_running_loop()
        while not protocol.closed_reason:
            now = loop.time()
            if now >= self._received_at + silence:
                self._close(f"it sent nothing for {silence:.0f} s")
                return
            if now >= self._sent_at + interval:
                try:
                    await self._send(channel, protocol.encode({"op": "beat", "id": 0}))
                except SandboxLost:
                    return
            await asyncio.sleep(min(self._sent_at + interval, self._received_at + silence) - loop.time() + 0.01)
