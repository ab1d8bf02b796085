"""The interpreter: the host's handle on the Python inside one open sandbox.

It is async. `sync_interpreter` has the synchronous version for scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .cancellation import run_shielded
from .errors import ConfigurationError, RlmBatchError, SandboxLost, SandboxStartError
from .intake.calls import Call, CallQueue, running_call
from .protocol import (
    REENTERED,
    START_TIMEOUT_SECONDS,
    DriverProtocol,
    PendingExecution,
    encode_exception,
    encode_value,
)
from .requests.execution_request import ExecutionRequest, WorkTime
from .thread_pool import ThreadPool

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .result import Result
    from .sandbox_api import Channel, Sandbox


log = logging.getLogger("rlm_batch.sandbox")
MIN_WORK_SECONDS = 0.05  # seconds between two looks at the work time of code that waits for the host
REFUSED_GRACE_SECONDS = 3.0  # seconds to send the cancellation of a refused execution

# The interpreters and contexts that wait for the tool running in this task or thread.
_waiting_for_tool: contextvars.ContextVar[tuple[tuple[Interpreter, str | None], ...]]
_waiting_for_tool = contextvars.ContextVar("_waiting_for_tool", default=())


class Interpreter:
    """A handle that runs code in one sandbox. `start` opens the sandbox, `shutdown` removes it.

    Executions may run concurrently, but executions of one context run one after another. At most 256 tool calls of an
    execution run at a time, and further calls wait.

    Args:
        open_sandbox: Opens the sandbox. It is called again only if it failed.
        timeout: Default time limit of an execution, in seconds; None means no limit.
        tools: Functions of the host that the code may call by name. Plain functions run in threads, async ones on the
            event loop.
        prepare: Code that runs before the first execution. Executions run in forks of its process.

    Attributes:
        on_start: Called when the sandbox is open and its driver ready. The first execution may have been sent by then.
        start_error: The error of a failed start.
        preparation: The code that runs before the first execution, or None.
        is_shut_down: True after `shutdown` and `keep`: the interpreter cannot be used again.
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
        self.preparation = prepare
        self.tools: dict[str, Callable[..., Any]] = {} if tools is None else tools
        self._open = open_sandbox
        self._protocol: DriverProtocol | None = None
        self._channel: Channel | None = None
        self._context_locks: dict[str, asyncio.Lock] = {}
        self._start_lock = asyncio.Lock()
        self._refresh_lock = asyncio.Lock()
        # Held while an answer to a tool call is encoded and sent, because its JSON may be large.
        self._answer_lock = asyncio.Lock()
        self._heartbeat: asyncio.Task[None] | None = None
        self.is_shut_down = False
        self._sent_at = self._received_at = 0.0
        self._threads = ThreadPool()
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
        if protocol is None or self._channel is None:
            return False
        return not protocol.closed_reason and not protocol.is_spent

    # -- opening and closing

    async def start(self) -> None:
        """Open the sandbox, start the driver and run the preparation. A second call does nothing.

        Raises:
            SandboxStartError, QuotaExceeded, ConfigurationError, PrepareError: The start failed, and the sandbox was
            removed.
        """
        await self._start()

    async def _start(self, request: ExecutionRequest | None = None) -> PendingExecution | None:
        """Start the sandbox, and send the request with the driver's settings, which saves a round trip.

        Return None if the request was not sent: the driver had started before, or a preparation runs first.
        """
        async with self._start_lock:
            if self._channel is not None:
                return None
            if self.is_shut_down:
                raise SandboxLost("this interpreter was shut down: create a new one")
            try:
                pending = await self._open_and_start(request)
            except BaseException as error:
                self.start_error = error
                raise
            if self.on_start is not None:
                self.on_start()
            if pending is None or self.preparation is None:
                return pending
            try:
                await self._wait(pending)
                pending.protocol.check_prepared(pending)
            except BaseException:
                await self.shutdown()
                raise
            return None

    async def _open_and_start(self, request: ExecutionRequest | None) -> PendingExecution | None:
        """Open a sandbox and start its driver. Remove the sandbox if this fails."""
        sandbox = await self._open()
        if self.is_shut_down:
            await run_shielded(sandbox.remove())
            raise SandboxLost("this interpreter was shut down while its sandbox was being opened")
        try:
            return await self._start_driver(sandbox, request)
        except BaseException as error:
            self._close("its driver did not start")
            self._protocol = self._channel = None
            await run_shielded(sandbox.remove())
            if isinstance(error, RlmBatchError) or not isinstance(error, Exception):
                raise
            raise SandboxStartError(f"the driver did not start in sandbox {sandbox.id}: {error}") from error

    async def _start_driver(self, sandbox: Sandbox, request: ExecutionRequest | None) -> PendingExecution | None:
        """Start the driver and send its settings, followed by the preparation or else by the request.

        Return the preparation or the request as a pending execution.
        """
        protocol = self._protocol = DriverProtocol(sandbox)
        self._sent_at = self._received_at = asyncio.get_running_loop().time()
        channel = self._channel = await sandbox.connect(self._receive, self._close)
        frames = [protocol.encode_start()]
        pending = None
        if self.preparation is not None:  # An execution sent now would wait in the driver until the preparation ends.
            pending, parts = protocol.add_preparation(self.preparation, self.on_prepare_output)
            frames += parts
        elif request is not None:
            pending, parts = protocol.add_execution(request)
            frames += parts
        is_request_sent = False
        try:
            await channel.send(b"".join(frames))
            is_request_sent = self.preparation is None
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                await protocol.answered.wait()
        except SandboxLost:
            if protocol.is_ready:  # The driver started, but the frame after its settings was not delivered.
                raise
            protocol.close_at_hangup()
        except TimeoutError:
            pass  # `check_ready` raises the error.
        protocol.check_ready(is_request_sent)
        if sandbox.settings.heartbeat is not None:
            self._heartbeat = asyncio.create_task(self._send_heartbeats(protocol, sandbox.settings.heartbeat))
        return pending

    async def shutdown(self) -> None:
        """Remove the sandbox. Running executions fail. A second call does nothing."""
        sandbox = self._disconnect()
        if sandbox is not None:
            await run_shielded(sandbox.remove())

    async def keep(self, until: float, execution: int | None = None) -> None:
        """Shut down, but leave the sandbox open. Remove the sandbox if the provider cannot keep it.

        Args:
            until: Time at which the sandbox ends, in epoch seconds.
            execution: Number of the failed execution, which the provider lists with the sandbox.
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
        """Close the connection and return the sandbox, or None if no sandbox is open."""
        self.is_shut_down = True
        self._close("it was shut down")
        self._threads.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._protocol is None:
            return None
        sandbox = self._protocol.sandbox
        self._protocol = None
        return sandbox

    async def __aenter__(self) -> Interpreter:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- executing

    async def execute(
        self, code: str | Callable[..., object], variables: dict[str, Any] | None = None, **settings: Any
    ) -> Result:
        """Run code in the sandbox and return what it submitted. `settings` are fields of ExecutionRequest."""
        return await self.run(ExecutionRequest(code, variables, **settings))

    async def run(self, request: ExecutionRequest) -> Result:
        """Run a request in the sandbox and return what its code submitted. Open the sandbox if it is not open.

        Raises:
            CodeError, ExecutionTimeout, SubmitError, StateLost: The code failed. These errors have `meta`.
            SandboxStartError, PrepareError, SandboxLost, OutcomeUnknown: The sandbox failed.
            ConfigurationError: A variable is not JSON, or a tool uses the context that waits for it.
        """
        if request.context is not None and (self, request.context) in _waiting_for_tool.get():
            raise ConfigurationError(REENTERED)
        request.complete(self.tools, self.timeout, self.preparation)
        for name, path in request.files.items():
            await self.upload(path, await asyncio.to_thread((request.encoded or {})[name].encode_file, name))
        if request.context is None:
            return await self._run_alone(request)
        async with self._context_locks.setdefault(request.context, asyncio.Lock()):
            return await self._run_alone(request)

    async def _run_alone(self, request: ExecutionRequest) -> Result:
        """Send a request whose context runs nothing else, and return its result."""
        pending = await self._start(request)
        frame = b""
        if pending is None:  # The request was not sent with the driver's settings.
            protocol = self._protocol
            if protocol is None:
                raise SandboxLost("the sandbox was shut down before the code was sent: run it in a new one")
            # An execution that starts during the refresh could lose the files it saves.
            async with self._refresh_lock:
                if not protocol.pending:
                    await protocol.sandbox.refresh_volume()
                pending, parts = protocol.add_execution(request)
            frame = b"".join(parts)
        if request.queries is not None and request.queries.is_top_level:
            request.queries.session.set_deadline(request.timeout)
        if request.work_time is None:
            await self._wait(pending, frame)
        else:
            await self._wait_for_work(pending, frame, request.work_time)
        return pending.protocol.take_result(pending)

    async def _wait_for_work(self, pending: PendingExecution, frame: bytes, work_time: WorkTime) -> None:
        """Send the frame and wait for the execution's end. Interrupt the code when its time for work is used up."""
        loop = asyncio.get_running_loop()
        started_at, used_before = loop.time(), work_time.used

        def count_seconds() -> float:
            waited = 0.0 if pending.calls is None else pending.calls.open_seconds
            work_time.used = used_before + loop.time() - started_at - waited
            return work_time.used

        async def interrupt_at_limit() -> None:
            while True:
                seconds_left = work_time.limit - count_seconds()
                if seconds_left <= 0:
                    break
                await asyncio.sleep(max(seconds_left, MIN_WORK_SECONDS))
            with contextlib.suppress(SandboxLost):
                await run_shielded(self._send(pending.protocol.encode({"op": "cancel", "id": pending.id})))

        interrupting = asyncio.create_task(interrupt_at_limit())
        try:
            await self._wait(pending, frame)
        finally:
            interrupting.cancel()
            count_seconds()

    async def _wait(self, pending: PendingExecution, frame: bytes = b"") -> None:
        """Send the frame, unless it is empty, and wait for the execution's end."""
        protocol = pending.protocol
        try:
            if frame:
                await self._send(frame)
            async with asyncio.timeout(protocol.compute_answer_timeout(pending)):
                await pending.ended.wait()
            if cancel := protocol.give_up(pending):  # The code exceeded a limit, and may block the wire.
                sending = asyncio.create_task(self._send(cancel))
                sending.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.wait([sending], timeout=REFUSED_GRACE_SECONDS)
        except TimeoutError:
            protocol.close_at_silence(pending)
        except asyncio.CancelledError:
            if cancel := protocol.give_up(pending):
                with contextlib.suppress(SandboxLost):
                    await run_shielded(self._send(cancel))
            raise
        finally:
            if pending.calls is not None:
                pending.calls.cancel()
            pending.end_collection()
            if pending.collected is not None:
                await run_shielded(asyncio.to_thread(pending.collected.finish))

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox (see `Sandbox.upload`). Open the sandbox if it is not open."""
        await self.start()
        if self._protocol is None:
            raise SandboxLost("the sandbox was shut down before the file was sent: run the code in a new one")
        await self._protocol.sandbox.upload(path, data)

    def is_busy(self, context: str) -> bool:
        """Return True if an execution of that context is running."""
        lock = self._context_locks.get(context)
        return lock is not None and lock.locked()

    async def forget_context(self, context: str) -> None:
        """End a context. The next execution under its name starts fresh."""
        if self._protocol is not None and not self._protocol.closed_reason:
            await self._send(self._protocol.encode_forget(context))

    # -- the wire

    async def _send(self, frame: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        assert self._channel is not None
        await self._channel.send(frame)

    def _receive(self, data: bytes) -> None:
        """Process data from the driver, and start to answer the calls of host functions in it."""
        if self._protocol is None:
            return
        self._received_at = asyncio.get_running_loop().time()
        for pending, call in self._protocol.receive(data):
            if pending.ended.is_set():
                continue
            if pending.calls is None:
                pending.calls = CallQueue(partial(self._call_tool, pending), pending.caller_context)
            refusal = pending.calls.add(call)
            if refusal:
                pending.refuse(refusal)

    async def _call_tool(self, pending: PendingExecution, call: Call) -> None:
        """Call a tool for the code and send its return value or exception."""
        # The tool's thread gets a copy of this context variable.
        _waiting_for_tool.set((*_waiting_for_tool.get(), (self, pending.request.context)))
        running_call.set(call)
        value = body = None
        try:
            tool = pending.bind_tool(call)
            value = tool() if inspect.iscoroutinefunction(tool) else await self._threads.run_in_thread(tool)
            if inspect.isawaitable(value):
                value = await value
        except asyncio.CancelledError as error:
            if pending.ended.is_set() or pending.id not in pending.protocol.pending:
                raise  # The execution has ended or is about to, so the reply is not needed.
            body = encode_exception(error)
        except BaseException as error:  # noqa: BLE001 - the code that called the tool handles it
            body = encode_exception(error)
        async with self._answer_lock:
            if body is None:
                body = encode_value(call.header["name"], value)
            if not pending.protocol.closed_reason:
                with contextlib.suppress(SandboxLost):  # The execution itself reports the loss.
                    await self._send(pending.protocol.encode_reply(call, body))

    def _close(self, reason: str) -> None:
        if self._protocol is not None:
            self._protocol.close(reason)

    async def _send_heartbeats(self, protocol: DriverProtocol, interval: float) -> None:
        """Send a heartbeat after each interval without another frame. Close the connection to a silent driver."""
        loop = asyncio.get_running_loop()
        silence = protocol.sandbox.settings.silence
        while not protocol.closed_reason:
            now = loop.time()
            if now >= self._received_at + silence:
                protocol.close(f"it sent nothing for {silence:.0f} s")
                return
            if now >= self._sent_at + interval:
                try:
                    await self._send(protocol.encode({"op": "beat", "id": 0}))
                except SandboxLost:
                    return
            next_check = min(self._sent_at + interval, self._received_at + silence)
            await asyncio.sleep(next_check - loop.time() + 0.01)  # Timers may be early by less than this.
