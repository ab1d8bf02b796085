"""Calls of the host's functions by code in a sandbox: how many run at a time, and how many may wait for their turn.

Arguments are read only when their call begins: as Python objects they take up to thirty times what they take as JSON.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from ..wire.strict_json import MAX_CONTAINERS

MIB = 1024 * 1024
MAX_CALLS = 256  # of one execution that run at a time; those of plain functions have a thread each
MAX_WAITING_CALLS = 10_000  # besides; a thread of the code waits for one at a time
MAX_WAITING_BYTES = 128 * MIB  # of JSON in calls that wait for their turn: of one execution, and of all together
MIN_WAITING_BYTES = 16 * MIB  # of those that one execution may have, however many the others have
MAX_ARGUMENTS_BYTES = 128 * MIB  # of Python objects in the arguments of all calls that run in this process
SMALL_BYTES = 16 * 1024  # of Python objects in the arguments of a call that does not wait for others
CALLS_AT_ONCE = 8  # that begin, or are answered, before the event loop does other things

CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: every other byte begins a character
WIDE_MARKS = (*(bytes([mark]) for mark in range(0xF0, 0xF5)), b"\\ud", b"\\uD")  # JSON of a character beyond U+FFFF
VALUE_BYTES = 40  # of a number or a short text, with its place in a list
CONTAINER_BYTES = 200  # of a list or a dict
MAX_MEASURED_VALUES = 1_000  # whose sizes are summed; of more the estimate counts

# The call for which a function of the host runs in this thread or task.
running_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("running_call", default=None)


class Call:
    """A call of a function of the host: the header of its frame, and its arguments as JSON until they are read."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body
        self.containers = body.count(b"[") + body.count(b"{")  # or more, where texts have such marks
        self.waiting_bytes = 0  # that are counted for it, until it begins
        self.argument_bytes = 0  # that are counted for it, from when it begins
        self.holders = 0  # the task that answers it, and threads that have its arguments

    def take_body(self) -> bytes:
        """Return the arguments as JSON, and forget them: from now on they are Python objects."""
        body, self.body = self.body, b""
        return body

    def estimate_argument_bytes(self) -> int:
        """Return about the most bytes that the arguments can take as Python objects, without reading them."""
        body = self.body
        width = 1  # a text has the width of its widest character
        if not body.isascii() or b"\\u" in body:
            width = 4 if any(mark in body for mark in WIDE_MARKS) else 2
        characters = len(body) if body.isascii() else len(body.translate(None, CONTINUATION_BYTES))
        values = body.count(b",") + body.count(b":")
        return characters * width + values * VALUE_BYTES + self.containers * CONTAINER_BYTES


def _measure(arguments: Any) -> int | None:
    """Return the bytes that the values take; None for more than `MAX_MEASURED_VALUES`."""
    values, size = [arguments], 0
    for count, value in enumerate(values):
        if count > MAX_MEASURED_VALUES:
            return None
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            values += value.values()  # type: ignore[reportUnknownArgumentType]
        elif isinstance(value, list):
            values += value  # type: ignore[reportUnknownArgumentType]
    return size


class HostMemory:
    """Counts the memory that calls take of this process, whatever executions they are of. Safe with several threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start anew: a fork of this process has none of its calls."""
        self._lock = threading.Lock()
        self.reading = threading.Lock()  # of a thread that reads arguments, which take several times their memory then
        self._waiting_bytes = self._executions = self._argument_bytes = 0
        self._line: dict[Call, Callable[[], None]] = {}  # of calls that wait for room

    def add_waiting(self, size: int, before: int) -> bool:
        """Count JSON that waits, of an execution that has `before` bytes; return whether it may have so much."""
        with self._lock:
            self._waiting_bytes += size
            self._executions += not before
            share = max(MIN_WAITING_BYTES, MAX_WAITING_BYTES // max(1, self._executions))
            return not before or self._waiting_bytes <= MAX_WAITING_BYTES or before + size <= share

    def remove_waiting(self, size: int, after: int) -> None:
        """Count JSON no more, of an execution that has `after` bytes left."""
        with self._lock:
            self._waiting_bytes -= size
            self._executions -= not after

    def take(self, call: Call, size: int, wake: Callable[[], None] | None) -> bool:
        """Count arguments that are about to be read, or return False and put the call into the line for room.

        `wake` is called when the call shall be tried again; it raises RuntimeError where nobody is there any more. A
        call without it does not wait.
        """
        with self._lock:
            is_first = next(iter(self._line), call) is call
            has_room = not self._argument_bytes or self._argument_bytes + size <= MAX_ARGUMENTS_BYTES
            if wake is not None and not (is_first and has_room):
                self._line.setdefault(call, wake)
                return False
            self._line.pop(call, None)
            call.holders, call.argument_bytes = 1, size
            self._argument_bytes += size
        self._wake_first()
        return True

    def resize(self, call: Call, size: int) -> None:
        """Count arguments that were read with the size that they have."""
        with self._lock:
            self._argument_bytes += size - call.argument_bytes
            call.argument_bytes = size
        self._wake_first()

    def hold(self, call: Call) -> None:
        """Count the call's arguments until one `let_go` more."""
        with self._lock:
            call.holders += bool(call.holders)

    def let_go(self, call: Call) -> None:
        """Count the call's arguments no more, once nothing holds them."""
        with self._lock:
            call.holders -= bool(call.holders)
            if call.holders:
                return
            self._argument_bytes -= call.argument_bytes
            call.argument_bytes = 0
        self._wake_first()

    def leave_line(self, call: Call) -> None:
        """Take a call out of the line, and wake whoever waits for its turn."""
        with self._lock:
            wake = self._line.pop(call, None)
        if wake is not None:
            _try_to_wake(wake)
        self._wake_first()

    def _wake_first(self) -> None:
        while self._line:
            with self._lock:
                call, wake = next(iter(self._line.items()), (None, None))
            if call is None or wake is None or _try_to_wake(wake):
                return
            with self._lock:
                self._line.pop(call, None)


def _try_to_wake(wake: Callable[[], None]) -> bool:
    try:
        wake()
    except RuntimeError:  # its event loop has ended
        return False
    return True


host_memory = HostMemory()


class CallLimit:
    """Counts the calls of one execution that are not answered yet. Safe to use from several threads.

    `context` is that of the caller of the execution. Where that is a function of the host which runs for a call, the
    calls of its execution do not wait for room: the call that waits for them may have it.
    """

    def __init__(self, context: contextvars.Context) -> None:
        self._lock = threading.Lock()
        self._calls = self._waiting_bytes = 0
        self._waiting: set[Call] = set()
        self._waits_for_room = context.get(running_call) is None
        self.has_ended = False

    def admit(self, call: Call) -> str:
        """Counts a call; what is wrong where there are too many, as a sentence for whoever wrote the code."""
        with self._lock:
            size = call.waiting_bytes = max(1, len(call.body))
            self._calls += 1
            self._waiting.add(call)
            is_within_share = host_memory.add_waiting(size, self._waiting_bytes)
            self._waiting_bytes += size
            if self._calls > MAX_CALLS + MAX_WAITING_CALLS:
                return (
                    f"the code has called functions of the host more than {MAX_CALLS + MAX_WAITING_CALLS:,} times "
                    "without waiting for an answer: call fewer at a time"
                )
            if self._waiting_bytes > MAX_WAITING_BYTES or not is_within_share:
                shared = "" if self._waiting_bytes > MAX_WAITING_BYTES else ", which all executions here share"
                return (
                    f"the code has called functions of the host with {self._waiting_bytes:,} bytes that wait for their "
                    f"turn, and there is room for {MAX_WAITING_BYTES:,}{shared}: call fewer at a time, or hand over "
                    "paths"
                )
            return ""

    def begin(self, call: Call, wake: Callable[[], None]) -> bool:
        """Counts a call's arguments, and returns True, or False where they have to wait: see `HostMemory.take`."""
        size = call.estimate_argument_bytes()
        if not host_memory.take(call, size, wake if self._waits_for_room and size > SMALL_BYTES else None):
            return False
        with self._lock:
            self._stop_waiting(call)
        return True

    def measure(self, call: Call, arguments: Any) -> None:
        """Counts arguments that were read with the size that they have, unless they are small or many values."""
        size = None if call.argument_bytes <= SMALL_BYTES else _measure(arguments)
        if size is not None:
            host_memory.resize(call, size)

    def release(self, call: Call) -> None:
        """Counts a call as answered."""
        with self._lock:
            self._calls -= 1
            self._stop_waiting(call)
        host_memory.let_go(call)

    def end(self) -> None:
        """Forgets the calls that wait: nobody waits for their answers any more."""
        self.has_ended = True
        with self._lock:
            waiting = list(self._waiting)
            for call in waiting:
                self._stop_waiting(call)
        for call in waiting:
            call.take_body()
            host_memory.leave_line(call)

    def _stop_waiting(self, call: Call) -> None:
        self._waiting.discard(call)
        size, call.waiting_bytes = call.waiting_bytes, 0
        if size:
            self._waiting_bytes -= size
            host_memory.remove_waiting(size, self._waiting_bytes)


class CallQueue:
    """Answers the calls of one execution, on the event loop: `MAX_CALLS` at a time, the others in their order.

    Fewer where their arguments have more than `MAX_CONTAINERS` lists and dicts together, for the garbage collector
    looks at all of them at once, or where there is no room for them. `answer` answers one, in a copy of `context`, and
    raises nothing.
    """

    def __init__(
        self, answer: Callable[[Call, CallLimit], Coroutine[Any, Any, None]], context: contextvars.Context
    ) -> None:
        self._answer = answer
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = CallLimit(context)
        self._containers = 0  # of the calls that are being answered
        self._is_starting = False

    def add(self, call: Call) -> str:
        """Takes a call, to be answered soon; what is wrong where there are too many, as `CallLimit.admit` says it."""
        refusal = self._limit.admit(call)
        if refusal:
            self.cancel()
        else:
            self._waiting.append(call)
            self._start_soon()
        return refusal

    def cancel(self) -> None:
        """Ends those that run, and forgets those that wait."""
        self._waiting.clear()
        self._limit.end()
        for task in self._tasks:
            task.cancel()

    def _start_soon(self) -> None:
        if self._waiting and not self._is_starting:
            self._is_starting = True
            self._start_some()

    def _start_some(self) -> None:
        for _ in range(CALLS_AT_ONCE):
            containers = self._waiting[0].containers if self._waiting else 0
            is_full = len(self._tasks) >= MAX_CALLS or (self._tasks and self._containers + containers > MAX_CONTAINERS)
            if not self._waiting or is_full or not self._limit.begin(self._waiting[0], self._wake):
                self._is_starting = False
                return
            call = self._waiting.popleft()
            self._containers += containers
            task = self._loop.create_task(self._answer(call, self._limit), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(lambda task, call=call: self._end(task, call))
        self._loop.call_soon(self._start_some)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._start_soon)

    def _end(self, task: asyncio.Task[None], call: Call) -> None:
        self._tasks.discard(task)
        self._containers -= call.containers
        self._limit.release(call)
        self._start_soon()
