"""Limits on calls of host functions by sandboxed code: how many run at a time, and how many may wait.

The host parses the arguments only when a call begins: Python objects take up to 30 times the memory of their JSON.
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
MAX_CALLS = 256  # running calls per execution; each call of a plain function takes a thread
MAX_WAITING_CALLS = 10_000  # waiting calls per execution; each thread of the code waits for one call at a time
MAX_WAITING_BYTES = 128 * MIB  # JSON of waiting calls, both per execution and in total
MIN_WAITING_BYTES = 16 * MIB  # JSON of waiting calls that every execution may have, regardless of others
MAX_ARGUMENTS_BYTES = 128 * MIB  # arguments of all running calls in this process, as Python objects
SMALL_BYTES = 16 * 1024  # calls with arguments up to this size, as Python objects, do not wait for memory
CALLS_AT_ONCE = 8  # calls started before the event loop gets a turn

CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # UTF-8 bytes that do not begin a character
WIDE_MARKS = (*(bytes([mark]) for mark in range(0xF0, 0xF5)), b"\\ud", b"\\uD")  # JSON of a character beyond U+FFFF
VALUE_BYTES = 40  # a number or a short text, with its slot in a list
CONTAINER_BYTES = 200  # a list or a dict
MAX_MEASURED_VALUES = 1_000  # arguments with more values keep their estimated size

# The call that the host function in this thread or task is serving.
running_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("running_call", default=None)


class Call:
    """A call of a host function: its frame's header, and its arguments as JSON until they are parsed."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body
        self.containers = body.count(b"[") + body.count(b"{")  # upper bound: texts may contain these characters
        self.waiting_bytes = 0  # counted until the call begins
        self.argument_bytes = 0  # counted from the call's beginning
        self.holders = 0  # references to the arguments: the task that answers the call, and threads

    def take_body(self) -> bytes:
        """Return the arguments as JSON and release them."""
        body, self.body = self.body, b""
        return body

    def estimate_argument_bytes(self) -> int:
        """Return an upper estimate of the arguments' size in bytes as Python objects, without parsing them."""
        body = self.body
        width = 1  # Python stores all characters of a string with the width of the widest one
        if not body.isascii() or b"\\u" in body:
            width = 4 if any(mark in body for mark in WIDE_MARKS) else 2
        characters = len(body) if body.isascii() else len(body.translate(None, CONTINUATION_BYTES))
        values = body.count(b",") + body.count(b":")
        return characters * width + values * VALUE_BYTES + self.containers * CONTAINER_BYTES


def _measure(arguments: Any) -> int | None:
    """Return the size of the values in bytes, or None for more than `MAX_MEASURED_VALUES`."""
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
    """A counter of the memory that calls of all executions take in this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset all counts. This also runs in a fork of this process, because a fork runs no calls."""
        self._lock = threading.Lock()
        self.reading = threading.Lock()  # held while a thread parses arguments, which takes several times their memory
        self._waiting_bytes = self._executions = self._argument_bytes = 0
        self._line: dict[Call, Callable[[], None]] = {}  # calls that wait for memory, in order

    def add_waiting(self, size: int, before: int) -> bool:
        """Count waiting JSON of an execution that has `before` bytes. Return False if this exceeds the limits."""
        with self._lock:
            self._waiting_bytes += size
            self._executions += not before
            share = max(MIN_WAITING_BYTES, MAX_WAITING_BYTES // max(1, self._executions))
            return not before or self._waiting_bytes <= MAX_WAITING_BYTES or before + size <= share

    def remove_waiting(self, size: int, after: int) -> None:
        """Stop counting waiting JSON of an execution that has `after` bytes left."""
        with self._lock:
            self._waiting_bytes -= size
            self._executions -= not after

    def take(self, call: Call, size: int, wake: Callable[[], None] | None) -> bool:
        """Count arguments before they are parsed. If there is no room, queue the call and return False.

        `wake` tells the caller to try again; it raises RuntimeError if its event loop is closed. A call
        without `wake` does not wait.
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
        """Replace the estimated size of parsed arguments by their real size."""
        with self._lock:
            self._argument_bytes += size - call.argument_bytes
            call.argument_bytes = size
        self._wake_first()

    def hold(self, call: Call) -> None:
        """Add a reference to the call's arguments: the arguments count until one more `let_go`."""
        with self._lock:
            call.holders += bool(call.holders)

    def let_go(self, call: Call) -> None:
        """Remove a reference to the call's arguments. Without references, the arguments no longer count."""
        with self._lock:
            call.holders -= bool(call.holders)
            if call.holders:
                return
            self._argument_bytes -= call.argument_bytes
            call.argument_bytes = 0
        self._wake_first()

    def leave_line(self, call: Call) -> None:
        """Remove a call from the line. Wake its queue and the first call that still waits."""
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
    except RuntimeError:  # the event loop is closed
        return False
    return True


host_memory = HostMemory()


class CallLimit:
    """A counter of the unanswered calls of one execution, with limits. Safe to use from several threads.

    `context` is the context of the execution's caller. If the caller is a host function that serves a call, calls of
    this execution do not wait for memory. Otherwise a deadlock is possible: the outer call may hold the memory.
    """

    def __init__(self, context: contextvars.Context) -> None:
        self._lock = threading.Lock()
        self._calls = self._waiting_bytes = 0
        self._waiting: set[Call] = set()
        self._waits_for_room = context.get(running_call) is None
        self.has_ended = False

    def admit(self, call: Call) -> str:
        """Count a call. Return an empty string, or the reason to refuse it, written for the code's author."""
        with self._lock:
            size = call.waiting_bytes = max(1, len(call.body))
            self._calls += 1
            self._waiting.add(call)
            is_within_share = host_memory.add_waiting(size, self._waiting_bytes)
            self._waiting_bytes += size
            if self._calls > MAX_CALLS + MAX_WAITING_CALLS:
                return (
                    f"the code called functions of the host more than {MAX_CALLS + MAX_WAITING_CALLS:,} "
                    "times without waiting for an answer: make fewer calls at a time"
                )
            if self._waiting_bytes > MAX_WAITING_BYTES or not is_within_share:
                shared = "" if self._waiting_bytes > MAX_WAITING_BYTES else ", which all executions here share"
                return (
                    f"the code's calls to functions of the host hold {self._waiting_bytes:,} bytes, and "
                    f"at most {MAX_WAITING_BYTES:,} may wait{shared}: make fewer calls at a time, or pass "
                    "paths"
                )
            return ""

    def begin(self, call: Call, wake: Callable[[], None]) -> bool:
        """Return True if the call may begin, or False if it waits for memory: see `HostMemory.take`."""
        size = call.estimate_argument_bytes()
        if not host_memory.take(call, size, wake if self._waits_for_room and size > SMALL_BYTES else None):
            return False
        with self._lock:
            self._stop_waiting(call)
        return True

    def measure(self, call: Call, arguments: Any) -> None:
        """Count parsed arguments with their real size, unless they are small or have too many values to measure."""
        size = None if call.argument_bytes <= SMALL_BYTES else _measure(arguments)
        if size is not None:
            host_memory.resize(call, size)

    def release(self, call: Call) -> None:
        """Count a call as answered."""
        with self._lock:
            self._calls -= 1
            self._stop_waiting(call)
        host_memory.let_go(call)

    def end(self) -> None:
        """Discard the waiting calls, because the execution no longer needs their answers."""
        self.has_ended = True
        if not self._waiting:  # the usual case, which needs no lock: no call is admitted after the end
            return
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
    """A queue that answers the calls of one execution in order, on the event loop, at most `MAX_CALLS` at a time.

    It answers fewer calls at a time if memory is short, or if the arguments together have more than `MAX_CONTAINERS`
    lists and dicts, which the garbage collector scans all at once. `answer` answers one call in a copy of `context` and
    must not raise.
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
        self._containers = 0  # lists and dicts in the arguments of running calls
        self._is_starting = False

    def add(self, call: Call) -> str:
        """Queue a call. Return an empty string, or the reason to refuse it; a refusal also cancels all calls."""
        refusal = self._limit.admit(call)
        if refusal:
            self.cancel()
        else:
            self._waiting.append(call)
            self._start_soon()
        return refusal

    def cancel(self) -> None:
        """Cancel the running calls and discard the waiting ones."""
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
