"""Limits on calls of host functions by sandboxed code: how many run at a time, and how many may wait.

The host parses the arguments only when a call begins: Python objects take up to 30 times the memory of their JSON.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

MIB = 1024 * 1024
MAX_CALLS = 256  # running calls per execution; each call of a plain function takes a thread
MAX_WAITING_CALLS = 10_000  # waiting calls per execution; each thread of the code waits for one call at a time
MAX_WAITING_BYTES = 128 * MIB  # JSON of waiting calls in this process
MIN_WAITING_BYTES = 16 * MIB  # JSON of waiting calls that every execution may have, regardless of others
MAX_RUNNING_BYTES = 32 * MIB  # sizes of all running calls in this process
SMALL_BYTES = 16 * 1024  # calls up to this size do not wait for others
CALLS_AT_ONCE = 8  # calls started before the event loop gets a turn
CONTAINER_BYTES = 300  # size of a list or a dict, which the garbage collector scans

# The call that the host function in this thread or task is serving.
running_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("running_call", default=None)


class Call:
    """A call of a host function: its frame's header, and its arguments as JSON until they are parsed."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body
        self.size = len(body) + CONTAINER_BYTES * (body.count(b"[") + body.count(b"{"))
        self.is_running = False

    def take_body(self) -> bytes:
        """Return the arguments as JSON and release them."""
        body, self.body = self.body, b""
        return body


class CallsInFlight:
    """The sizes of the unanswered calls of all executions in this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset all counts. This also runs in a fork of this process, because a fork runs no calls."""
        self._lock = threading.Lock()
        self._waiting_bytes = self._running_bytes = 0
        self._wakes: list[Callable[[], None]] = []

    def add_waiting(self, size: int) -> int:
        """Add bytes of waiting JSON, or remove a negative number of bytes. Return the sum."""
        with self._lock:
            self._waiting_bytes += size
            return self._waiting_bytes

    def begin(self, size: int, wake: Callable[[], None] | None) -> bool:
        """Count a call as running. If there is no room, return False, and call `wake` when there may be room.

        `wake` raises RuntimeError if its event loop is closed. A call without `wake` does not wait.
        """
        with self._lock:
            if wake is not None and self._running_bytes and self._running_bytes + size > MAX_RUNNING_BYTES:
                self._wakes.append(wake)
                return False
            self._running_bytes += size
            return True

    def end(self, size: int) -> None:
        """Stop counting a running call, and wake all waiting ones."""
        with self._lock:
            self._running_bytes -= size
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            with suppress(RuntimeError):
                wake()


calls_in_flight = CallsInFlight()


class CallLimit:
    """A counter of the unanswered calls of one execution, with limits. Safe to use from several threads.

    `context` is the context of the execution's caller. If the caller is a host function that serves a call, calls of
    this execution do not wait for others. Otherwise a deadlock is possible: the outer call may take all the room.
    """

    def __init__(self, context: contextvars.Context) -> None:
        self._lock = threading.Lock()
        self._calls = self._waiting_bytes = 0
        self._waiting: dict[Call, int] = {}  # bytes of JSON
        self._waits_for_room = context.get(running_call) is None
        self.has_ended = False

    def admit(self, call: Call) -> str:
        """Count a call. Return an empty string, or the reason to refuse it, written for the code's author."""
        with self._lock:
            size = self._waiting[call] = len(call.body)
            self._calls += 1
            self._waiting_bytes += size
            total = calls_in_flight.add_waiting(size)
            if self._calls > MAX_CALLS + MAX_WAITING_CALLS:
                return (
                    f"the code called functions of the host more than {MAX_CALLS + MAX_WAITING_CALLS:,} "
                    "times without waiting for an answer: make fewer calls at a time"
                )
            if total > MAX_WAITING_BYTES and self._waiting_bytes > MIN_WAITING_BYTES:
                return (
                    f"the code's calls to functions of the host hold {self._waiting_bytes:,} bytes, and calls of all "
                    f"executions here may hold {MAX_WAITING_BYTES:,}: make fewer calls at a time, or pass paths"
                )
            return ""

    def begin(self, call: Call, wake: Callable[[], None]) -> bool:
        """Return True if the call may begin, or False if it waits for others: see `CallsInFlight.begin`."""
        can_wait = self._waits_for_room and call.size > SMALL_BYTES
        call.is_running = calls_in_flight.begin(call.size, wake if can_wait else None)
        if call.is_running:
            self._stop_waiting(call)
        return call.is_running

    def release(self, call: Call) -> None:
        """Count a call as answered."""
        with self._lock:
            self._calls -= 1
        self._stop_waiting(call)
        if call.is_running:
            call.is_running = False
            calls_in_flight.end(call.size)

    def end(self) -> None:
        """Discard the waiting calls, because the execution no longer needs their answers."""
        self.has_ended = True
        if not self._waiting:  # the usual case, which needs no lock: no call is admitted after the end
            return
        for call in list(self._waiting):
            self._stop_waiting(call)
            call.take_body()
        calls_in_flight.end(0)  # wakes the threads of the discarded calls

    def _stop_waiting(self, call: Call) -> None:
        with self._lock:
            size = self._waiting.pop(call, 0)
            self._waiting_bytes -= size
        calls_in_flight.add_waiting(-size)


class CallQueue:
    """A queue that answers the calls of one execution in order, on the event loop, at most `MAX_CALLS` at a time.

    It answers fewer calls at a time if the running calls of all executions are large. `answer` answers one call in a
    copy of `context` and must not raise.
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
            is_full = len(self._tasks) >= MAX_CALLS
            if not self._waiting or is_full or not self._limit.begin(self._waiting[0], self._wake):
                self._is_starting = False
                return
            call = self._waiting.popleft()
            task = self._loop.create_task(self._answer(call, self._limit), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(lambda task, call=call: self._end(task, call))
        self._loop.call_soon(self._start_some)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._start_soon)

    def _end(self, task: asyncio.Task[None], call: Call) -> None:
        self._tasks.discard(task)
        self._limit.release(call)
        self._start_soon()
