"""A conversation over two descriptors, on the thread that asks: for a sandbox on this machine, called from a script.

An event loop in another thread would cost two changes of thread for each execution, which is as long as everything
else that a short one takes (benchmarks/interpreter.py).
"""

from __future__ import annotations

import inspect
import os
import select
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError, SandboxLost
from .protocol import ANSWER_GRACE, START_TIMEOUT, Conversation, Frame, Pending, answer, arguments, refusal
from .thread_pool import ThreadPool
from .wire.frames import BadFrameError

if TYPE_CHECKING:
    from .protocol import Tools
    from .result import Result

READ_SIZE = 64 * 1024  # a larger buffer would be mapped anew for each read
LONGEST_WAIT = 3600.0  # seconds in one system call, whose own limit is some 24 days
CANCEL_GRACE = 3.0  # seconds for an execution that Ctrl-C has ended to say so


class DirectConversation:
    """Speaks with one driver. `run` runs a coroutine elsewhere and waits for it: for tools that are async."""

    def __init__(
        self,
        conversation: Conversation,
        reads: int,
        writes: int,
        run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any],
    ) -> None:
        self._conversation = conversation
        self._reads = reads
        self._writes = writes
        self._run = run
        self._sending = threading.Lock()
        self._executing = threading.Lock()
        self._threads = ThreadPool()
        self._in_tool = threading.local()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(reads, select.POLLIN)
        self._writable.register(writes, select.POLLOUT)

    def start(self) -> None:
        """Starts the driver. Raises SandboxStartError."""
        with suppress(SandboxLost):  # why it is not ready is known below
            self._say(self._conversation.start)
        deadline = time.monotonic() + START_TIMEOUT
        while not self._conversation.ready and not self._conversation.gone and time.monotonic() < deadline:
            self._listen(deadline)
        if not self._conversation.ready:
            raise self._conversation.not_started()

    def execute(
        self, body: bytes, variables: dict[str, Any], timeout: float | None, context: str | None, tools: Tools
    ) -> Result:
        """One execution; see `Interpreter.execute`. From another thread it waits for the one that is under way."""
        if getattr(self._in_tool, "yes", False):
            raise ConfigurationError("a tool cannot run code in the interpreter that waits for it: give it another one")
        with self._executing:
            conversation = self._conversation
            with self._sending:
                pending, frame = conversation.execute(body, variables, timeout, context, tools)
                self._write(frame)
            try:
                self._await(pending, None if timeout is None else time.monotonic() + timeout + ANSWER_GRACE)
            except BaseException:  # Ctrl-C, or whatever else a signal handler of the script's raises
                self._cancel(pending)
                raise
            if pending.end is None:
                raise conversation.lost(pending)
            return conversation.result(pending)

    def close(self) -> None:
        """Lets go of the threads; the descriptors are the sandbox's."""
        self._conversation.gone = self._conversation.gone or "it was shut down"
        self._threads.close()

    def _cancel(self, pending: Pending) -> None:
        if self._conversation.gone or pending.end is not None:
            return
        try:
            self._say(lambda: self._conversation.cancel(pending))
        except SandboxLost:
            return
        self._await(pending, time.monotonic() + CANCEL_GRACE)

    def _await(self, pending: Pending, deadline: float | None) -> None:
        while pending.end is None and not self._conversation.gone:
            if deadline is not None and time.monotonic() >= deadline:
                self._conversation.gone = self._conversation.silent(pending)
                return
            self._listen(deadline)

    def _listen(self, deadline: float | None) -> None:
        """Waits for the driver until the deadline (monotonic seconds), and takes what it says."""
        wait = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT) * 1000
        if not self._readable.poll(wait):
            return
        heard = False
        try:
            try:
                data = os.read(self._reads, READ_SIZE)
            except OSError:
                data = b""
            if not data:
                self._conversation.gone = self._conversation.gone or self._conversation.hung_up()
                return
            for pending, call in self._conversation.hear(data):
                if pending.end is None:
                    self._threads.submit(partial(self._answer, pending, call))
            heard = True
        except BadFrameError as error:
            self._conversation.gone = f"it sent what is no frame ({error})"
        finally:
            if not heard:
                # A signal handler has raised meanwhile: a part of what the driver said may be lost.
                self._conversation.gone = self._conversation.gone or "it was interrupted in the middle of a frame"

    def _answer(self, pending: Pending, call: Frame) -> None:
        self._in_tool.yes = True
        header, body = call
        try:
            tool = pending.tools[header["name"]]
            args, kwargs = arguments(body)
            value = tool(*args, **kwargs)
            if inspect.isawaitable(value):
                value = self._run(partial(_awaited, value))
            reply = answer(header["name"], value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the code's to handle
            reply = refusal(error)
        with suppress(SandboxLost):  # the execution that asked learns of it by its own end
            self._say(lambda: self._conversation.reply(header, reply))

    def _say(self, frame: Callable[[], bytes]) -> None:
        """Makes a frame and sends it whole, so that frames go out in the order of their numbers."""
        with self._sending:
            self._write(frame())

    def _write(self, frame: bytes) -> None:
        data = memoryview(frame)
        try:
            while data:
                try:
                    data = data[os.write(self._writes, data) :]
                except BlockingIOError:
                    self._writable.poll()
        except OSError:
            self._conversation.gone = self._conversation.gone or self._conversation.hung_up()
            raise SandboxLost("the sandbox's process has ended: run the code in a new one") from None
        except BaseException:
            # Half a frame is on the wire, and nothing can follow it.
            self._conversation.gone = self._conversation.gone or "it was interrupted in the middle of a frame"
            raise


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
