"""The protocol over two descriptors, on the calling thread, for scripts that use a sandbox on this machine.

`Interpreter` does the same on an event loop. A loop on the calling thread is slower: a warm call takes 1.25 times as
long, and one with 1 MiB 1.08 times. A loop in another thread costs two thread switches for each execution, which take
as long as the rest of a short one.
"""

from __future__ import annotations

import inspect
import math
import os
import select
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError, SandboxLost
from .intake.calls import Call, CallLimit, running_call
from .protocol import (
    REENTERED,
    STALL_SECONDS,
    START_TIMEOUT_SECONDS,
    DriverProtocol,
    PendingExecution,
    encode_exception,
    encode_value,
)
from .thread_pool import ThreadPool
from .wire.pipes import READ_BYTES, write_available

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .requests.execution_request import ExecutionRequest
    from .result import Result
    from .sessions.output_listener import OutputQueue

# Seconds. The limit bounds the delay of Ctrl-C: a signal that arrives just before a system call does not interrupt it.
MAX_WAIT_SECONDS = 1.0
INTERRUPTED = "it was interrupted in the middle of a frame"


class PipeTransport:
    """A connection to one driver.

    Args:
        protocol: The protocol's state.
        reads: Descriptor from which the driver's frames are read.
        writes: Descriptor to which frames are written.
        run: Runs the coroutine of an async tool on an event loop and waits for it.
        stall_seconds: Seconds after which a driver that reads no input counts as lost.
    """

    def __init__(
        self,
        protocol: DriverProtocol,
        reads: int,
        writes: int,
        run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any],
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._protocol = protocol
        self._reads = reads
        self._writes = writes
        self._run = run
        self._stall_seconds = stall_seconds
        self._send_lock = threading.Lock()
        # Held while an answer to a tool call is encoded and sent, because its JSON may be large.
        self._answer_lock = threading.Lock()
        self._execute_lock = threading.Lock()
        self._threads = ThreadPool()
        # `is_waited_for` is True in threads that run a tool or deliver output, because an execution waits for them.
        self._thread = threading.local()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(reads, select.POLLIN)
        self._writable.register(writes, select.POLLOUT)

    def start(self, prepare: Preparation | None = None) -> None:
        """Start the driver and run the preparation. Raise SandboxStartError or PrepareError."""
        protocol = self._protocol
        with suppress(SandboxLost):  # `check_ready` below raises the reason.
            self._send(protocol.encode_start)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not protocol.is_ready and not protocol.closed_reason and time.monotonic() < deadline:
            self._receive(deadline)
        protocol.check_ready()
        if prepare is not None:
            pending = self._execute(lambda: protocol.add_preparation(prepare))
            protocol.check_prepared(pending)

    def execute(self, request: ExecutionRequest, output: OutputQueue | None = None) -> Result:
        """Run one completed request. A call from another thread waits for the running execution.

        The calling thread delivers the text in the queue `output`.
        """
        if getattr(self._thread, "is_waited_for", False):
            raise ConfigurationError(REENTERED)
        with self._execute_lock:
            pending = self._execute(lambda: self._protocol.add_execution(request), output)
            return self._protocol.take_result(pending)

    def _execute(
        self, add: Callable[[], tuple[PendingExecution, list[bytes]]], output: OutputQueue | None = None
    ) -> PendingExecution:
        """Send the execution or preparation that `add` registers, and wait for its end."""
        with self._send_lock:
            pending, frame = add()
            self._write(*frame)
        self._call_limit = CallLimit(pending.caller_context)
        try:
            self._wait(pending, output)
        finally:  # This also runs after a refusal, Ctrl-C, or an exception of a signal handler.
            self._call_limit.end()
            if pending.id in self._protocol.pending:
                with suppress(SandboxLost):
                    self._send(lambda: self._protocol.give_up(pending))
            pending.end_collection()
            if pending.collected is not None:
                pending.collected.finish()
        return pending

    def forget_context(self, context: str) -> bool:
        """End a context, so that the next execution under its name starts fresh.

        Return False, and do nothing, while an execution is running. Raise SandboxLost if the sandbox is gone.
        """
        if not self._execute_lock.acquire(blocking=False):
            return False
        try:
            self._send(lambda: self._protocol.encode_forget(context))
        finally:
            self._execute_lock.release()
        return True

    def close(self) -> None:
        """End the threads. The sandbox owns the descriptors and closes them."""
        self._protocol.close("it was shut down")
        self._threads.close()

    def _wait(self, pending: PendingExecution, output: OutputQueue | None) -> None:
        """Receive until the execution or the connection ends, or until the driver counts as lost.

        The time spent delivering output does not count.
        """
        deadline = math.inf
        seconds = self._protocol.compute_answer_timeout(pending)
        if seconds is not None:
            deadline = time.monotonic() + seconds
        while not pending.ended.is_set():
            if time.monotonic() >= deadline:
                self._protocol.close_at_silence(pending)
                return
            self._receive(deadline)
            if output is not None:
                self._thread.is_waited_for = True
                try:
                    deadline += output.deliver()
                finally:
                    self._thread.is_waited_for = False

    def _receive(self, deadline: float) -> None:
        """Wait for data from the driver until the deadline (monotonic seconds), and process the data."""
        seconds = min(deadline - time.monotonic(), MAX_WAIT_SECONDS)
        if not self._readable.poll(max(0.0, seconds * 1000)):
            return
        try:
            calls = self._read_calls()
        except BaseException:  # A signal handler raised: frames of the driver may be lost.
            self._protocol.close(INTERRUPTED)
            raise
        # A signal handler that raises here loses only calls of the execution that it ends, so the sandbox stays usable.
        # Interrupts often come here, because starting a thread is slow on a busy machine.
        for pending, call in calls:
            if not pending.ended.is_set():
                refusal = self._call_limit.admit(call)
                if refusal:
                    pending.refuse(refusal)
                self._threads.submit(partial(self._call_tool, pending, call, self._call_limit))

    def _read_calls(self) -> list[tuple[PendingExecution, Call]]:
        """Read what the driver has sent, and return its calls. Close the connection if the driver has closed it."""
        try:
            data = os.read(self._reads, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._protocol.close_at_hangup()
        return self._protocol.receive(data)

    def _call_tool(self, pending: PendingExecution, call: Call, limit: CallLimit) -> None:
        """Call a tool for the code and send its return value or exception."""
        has_room: SimpleQueue[None] = SimpleQueue()
        while not limit.has_ended and not limit.begin(call, partial(has_room.put, None)):
            has_room.get()
        if limit.has_ended or pending.ended.is_set():
            limit.release(call)
            return  # The execution ended while the call waited for room.
        self._thread.is_waited_for = True
        running_call.set(call)
        value = body = None
        try:
            value = pending.bind_tool(call)()
            if inspect.isawaitable(value):
                value = self._run(partial(_await, value))
        except BaseException as error:  # noqa: BLE001 - the code that called the tool handles it
            body = encode_exception(error)
        with self._answer_lock:
            answer = encode_value(call.header["name"], value) if body is None else body
            with suppress(SandboxLost):  # The execution itself reports the loss.
                self._send(lambda: self._protocol.encode_reply(call, answer))
        limit.release(call)

    def _send(self, make_frame: Callable[[], bytes]) -> None:
        """Encode and send a frame under one lock, so that frames are sent in the order of their numbers."""
        with self._send_lock:
            self._write(make_frame())

    def _write(self, *parts: bytes) -> None:
        """Write all parts of a frame. Raise SandboxLost if the driver has ended or reads nothing for too long."""
        unwritten = [memoryview(part) for part in parts]
        stalled_at = time.monotonic() + self._stall_seconds
        try:
            while unwritten:
                if self._protocol.closed_reason:
                    raise SandboxLost(f"the sandbox was lost ({self._protocol.closed_reason}): run it in a new one")
                rest = write_available(self._writes, unwritten)
                if rest is not unwritten:
                    stalled_at = time.monotonic() + self._stall_seconds
                else:  # Check the time only after a failed write: this process itself may have been stopped.
                    if time.monotonic() >= stalled_at:
                        self._protocol.close(f"it read none of its input for {self._stall_seconds:g} s")
                    self._writable.poll(MAX_WAIT_SECONDS * 1000)
                unwritten = rest
        except OSError:
            self._protocol.close_at_hangup()
            raise SandboxLost("the sandbox's process has ended: run the code in a new one") from None
        except SandboxLost:
            raise
        except BaseException:  # A signal handler raised. After a partial frame no other frame can follow.
            self._protocol.close(INTERRUPTED)
            raise


async def _await(value: Awaitable[Any]) -> Any:
    return await value
