"""A child's channel to its supervisor: calls of the code go out, and replies come in.

An interrupt is raised only between two instructions of the code, never inside the channel's own work.

The driver starts no threads. Of the threads that wait for a reply, one reads the channel for all. When the reply of
this reader has arrived, another waiting thread becomes the reader.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import select
import sys
from _thread import allocate_lock, get_ident

from ...wire.frames import MAX_CALL_BYTES, FrameReader, encode_frame
from ...wire.pipes import READ_BYTES
from ...wire.strict_json import (
    MAX_CONTAINERS,
    NotJsonError,
    convert_fields,
    dumps,
    encode_fields,
    has_too_many_containers,
    loads,
)
from ..processes import signal
from .submit import Submitted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

CHANNEL_IN, CHANNEL_OUT = 3, 4  # descriptors of a child's channel
FORK_REQUESTS = 5  # descriptor of the socket for fork requests, if any


def place_descriptors(ends: list[int]) -> list[int]:
    """Copy a child's pipe ends (channel, output, error, fork requests) to fixed numbers.

    Return the descriptors that were copied and are to be closed. All are above the fixed numbers.
    """
    lowest = FORK_REQUESTS + 1
    sources = [fd if fd >= lowest else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest) for fd in ends]
    for source, target in zip(sources, (CHANNEL_IN, CHANNEL_OUT, 1, 2, FORK_REQUESTS)):
        is_output = target in (1, 2)
        os.dup2(source, target, inheritable=is_output)
    return sources


def report_unconfined(error: OSError) -> NoReturn:
    """Report on the channel that the calling process could not be confined, and exit: no code may run in it."""
    message = dumps({"message": f"the confinement could not be set up: {error.strerror or error}"}).encode()
    os.write(CHANNEL_OUT, encode_frame({"op": "end", "status": "setup"}, message))
    os._exit(0)


class ToolError(RuntimeError):
    """A failure of a host function; the message begins with the type of its error."""

    __module__ = "builtins"  # the name that code sees in tracebacks


class Interrupted(KeyboardInterrupt):
    """The end of an execution that was cancelled or exceeded its timeout."""

    __module__ = "builtins"  # the name that code sees in tracebacks


class InterruptShield:
    """The handler of SIGINT for the code. A `with` block of this object delays interrupts of the main thread."""

    def __init__(self) -> None:
        self.main_thread = get_ident()
        self.accepts_interrupts = False  # True while code runs
        self.has_submitted = False
        self._depth = 0  # nested blocks
        self._is_pending = False  # True if an interrupt arrived inside a block

    def handle_interrupts(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)

    def reset(self) -> None:
        self.has_submitted = self._is_pending = False

    def __enter__(self) -> None:
        if get_ident() == self.main_thread:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Raise an interrupt that arrived inside the block."""
        if get_ident() == self.main_thread:
            self._depth -= 1
            if self._is_pending and not self._depth:
                self._raise()

    def _on_interrupt(self, _number: int, _frame: object) -> None:
        if not self.accepts_interrupts:
            return
        if self._depth:
            self._is_pending = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_pending = False
        if self.has_submitted:
            raise Submitted
        raise Interrupted


class Waiter:
    """A thread that waits for one frame: a reply, the settings or the next execution."""

    __slots__ = ("frame", "is_reader", "is_waiting", "wake_lock")

    def __init__(self) -> None:
        self.wake_lock = allocate_lock()
        self.wake_lock.acquire()  # The thread sleeps by acquiring this lock a second time, until `wake` releases it.
        self.frame: tuple[dict[str, Any], bytes | None] | None = None
        self.is_waiting = False
        self.is_reader = False  # this thread reads the channel for all waiting threads

    def wake(self) -> None:
        if self.wake_lock.locked():
            self.wake_lock.release()


class ThreadExecution(_thread._local):  # type: ignore[reportPrivateUsage]
    """The number and token of the calling thread's execution. A thread that native code started has none."""

    number = 0
    token = ""

    def begin(self, number: int, token: str, is_only: bool) -> None:
        """Assign an execution to the calling thread, or if it is the only one of the process to every thread."""
        owner = type(self) if is_only else self
        owner.number, owner.token = number, token

    @classmethod
    def forget(cls) -> None:
        """Let no thread belong to an execution. (A fork has inherited its parent's execution.)"""
        cls.number, cls.token = 0, ""

    def pass_on(self) -> None:
        """Let each thread that is started from now on belong to the execution of the thread that starts it."""
        threading = sys.modules.get("threading")
        for name in ("start_new_thread", "start_new", "start_joinable_thread"):  # the last one from Python 3.13 on
            start = getattr(_thread, name, None)
            if start is not None:
                wrapper = self._wrap(start)
                setattr(_thread, name, wrapper)
                if hasattr(threading, "_" + name):
                    setattr(threading, "_" + name, wrapper)

    def _wrap(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def start_thread(function: Any, *args: Any, **options: Any) -> Any:
            # Any thread can read the variables of a frame, so the new thread removes the token from this list.
            executions = [(self.number, self.token)]

            def run(*values: Any, **keywords: Any) -> Any:
                self.number, self.token = executions.pop()
                return function(*values, **keywords)

            return start(run, *args, **options)

        start_thread.__name__ = start_thread.__qualname__ = start.__name__
        return start_thread


class Channel:
    """The frames to and from the supervisor.

    `number` counts the executions from 1, and `own` holds the execution of the calling thread. Frames that end an
    execution carry its token. Calls carry the `call_token` of the current execution, whichever thread calls.
    """

    NEXT, SETTINGS = -1, -2  # numbers of the next execution and of the settings
    _NUMBERS = {"execute": NEXT, "start": SETTINGS}  # noqa: RUF012 - numbers of frames that answer no call

    def __init__(self, shield: InterruptShield) -> None:
        self.number = 0
        self.own = ThreadExecution()
        self.call_token = ""
        self.process_id = os.getpid()
        self._shield = shield
        self.lock = allocate_lock()  # guards waiters, call numbers and the reader role; held for a few instructions
        self._send_lock = allocate_lock()
        self._frames = FrameReader()
        self._poll = select.poll()
        self._poll.register(CHANNEL_IN, select.POLLIN)
        self._waiters: dict[int, Waiter] = {}
        self._has_reader = False
        self._calls = 0

    def send(self, header: dict[str, Any], body: bytes | None = None) -> None:
        data = memoryview(encode_frame(header, body))
        with self._send_lock:
            while data:
                data = data[os.write(CHANNEL_OUT, data) :]

    @property
    def token(self) -> str:
        return self.own.token

    @property
    def is_current_thread(self) -> bool:
        """Return whether the calling thread belongs to the current execution, and not to an earlier one."""
        return self.own.number == self.number

    def begin_execution(self, header: dict[str, Any]) -> None:
        """Make the header's execution the current one, and remove the token from the header."""
        # Threads of earlier executions can read the variables of frames, and must not find the token there.
        self.number += 1
        self.call_token = header["call_token"]
        if self.number == 1 and not header["once"]:
            self.own.pass_on()
        self.own.begin(self.number, header.pop("token"), is_only=header["once"])

    def expect_execution(self) -> Waiter:
        """Return the waiter for the next execution, whose frame may arrive from now on."""
        return self._waiters.setdefault(self.NEXT, Waiter())

    def wait_for_settings(self) -> bytes:
        """Wait for the sandbox's settings and return their JSON, in a process forked before they were known."""
        waiter = self._waiters[self.SETTINGS] = Waiter()
        self.expect_execution()  # The execution may arrive together with the settings.
        return self.wait(self.SETTINGS, waiter)[1] or b"{}"

    def wait(self, number: int, waiter: Waiter) -> tuple[dict[str, Any], bytes | None]:
        """Wait for the waiter's frame and return it. If no thread reads the channel, read it for all waiters."""
        try:
            with self._shield, self.lock:
                waiter.is_waiting = True
                if not self._has_reader:
                    self._has_reader = waiter.is_reader = True
            while waiter.frame is None:
                if not waiter.is_reader:
                    waiter.wake_lock.acquire()  # Wait until the frame arrives, or until this thread becomes the reader.
                    continue
                if self._shield.accepts_interrupts:
                    self._poll.poll()  # An interrupt may be raised here, but not during a read.
                with self._shield:
                    self._read()
            return waiter.frame
        finally:
            with self._shield, self.lock:
                self._waiters.pop(number, None)
                if waiter.is_reader:
                    self._choose_reader()

    def _choose_reader(self) -> None:
        """Make another waiting thread the reader. The caller holds the lock."""
        self._has_reader = False
        for waiter in self._waiters.values():
            if waiter.is_waiting and waiter.frame is None:
                self._has_reader = waiter.is_reader = True
                waiter.wake()
                return

    def _read(self) -> None:
        data = os.read(CHANNEL_IN, READ_BYTES)
        if not data:
            os._exit(0)  # the supervisor has ended
        for header, body in self._frames.feed(data):
            number = self._NUMBERS.get(header["op"])
            if number is None:
                number = header["call"]
                if header["token"] != self.call_token:
                    continue  # a reply to an earlier execution
            with self.lock:
                waiter = self._waiters.get(number)
                if waiter is not None:
                    waiter.frame = (header, body)
                    waiter.wake()

    def check_process(self, name: str) -> None:
        if os.getpid() != self.process_id:
            raise RuntimeError(f"{name} works only in the code's main process: return the value to it first")

    def call_host(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the host's function and return its value. Raises the host's exception, or ToolError."""
        self.check_process(name)
        try:
            arguments = convert_fields({"args": list(args), "kwargs": kwargs})
            body = encode_fields(arguments)
        except NotJsonError as error:
            raise TypeError(f"{name}: {error}") from None
        if len(body) > MAX_CALL_BYTES:
            raise ValueError(
                f"{name} was given {len(body):,} bytes, and takes at most {MAX_CALL_BYTES:,}: pass a path instead"
            )
        if has_too_many_containers(arguments, body):
            raise ValueError(f"{name} was given more than {MAX_CONTAINERS:,} lists and dicts: pass a path instead")
        waiter = Waiter()
        with self._shield:
            with self.lock:
                self._calls += 1
                number = self._calls
                self._waiters[number] = waiter
            self.send({"op": "call", "token": self.call_token, "call": number, "name": name}, body)
        _, answer = self.wait(number, waiter)
        reply = loads((answer or b"{}").decode("utf-8"))
        if "error" in reply:
            raise _build_host_error(reply["error"])
        return reply["value"]


def _build_host_error(error: dict[str, str]) -> BaseException:
    """Return an error of the type that the host's function raised, or ToolError for a type that is not built in."""
    import builtins

    kind: Any = getattr(builtins, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(error["message"])
        except TypeError:
            pass  # a type that needs more than a message, such as UnicodeDecodeError
    return ToolError(f"{error['type']}: {error['message']}")
