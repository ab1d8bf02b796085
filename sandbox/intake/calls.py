"""Limits on calls of host functions by sandboxed code: the calls that run at a time, and those that may wait.

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
from functools import partial
from typing import Any, ClassVar

MIB = 1024 * 1024
MAX_CALLS = 256  # running calls per execution; each call of a plain function takes a thread
MAX_WAITING_CALLS = 10_000  # waiting calls per execution
MAX_UNANSWERED_BYTES = 128 * MIB  # JSON of unanswered calls in this process
MIN_UNANSWERED_BYTES = 16 * MIB  # JSON of unanswered calls that every execution may have, regardless of others
MAX_RUNNING_BYTES = 32 * MIB  # parsed arguments of all running calls in this process
SMALL_BYTES = 16 * 1024  # calls up to this size do not wait for others
CONTAINER_BYTES = 300  # size of a list or a dict, which the garbage collector scans

# The call that the host function in this thread or task is serving.
running_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("running_call", default=None)


class Call:
    """A call of a host function: its frame's header, and its arguments as JSON until they are parsed."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body
        self.json_bytes = len(body)  # still known after `take_body`
        # An estimate of the memory that the parsed arguments take.
        self.parsed_bytes = len(body) + CONTAINER_BYTES * (body.count(b"[") + body.count(b"{"))
        self.is_running = False

    def take_body(self) -> bytes:
        """Return the arguments as JSON, and release their memory here."""
        body = self.body
        self.body = b""
        return body


class CallLimit:
    """A counter of the unanswered calls of one execution, with limits. Safe to use from several threads.

    Calls with large arguments wait until the running calls of this process leave room. If the execution's own caller is
    a host function that serves a call, its calls do not wait, because the outer call may take all the room.

    Args:
        context: The context of the execution's caller.
    """

    # These count the calls of all executions in this process.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _all_bytes: ClassVar[int] = 0  # JSON of unanswered calls
    _all_running_bytes: ClassVar[int] = 0  # parsed arguments of running calls
    _wakes: ClassVar[set[Callable[[], None]]] = set()  # functions to call when there may be room

    def __init__(self, context: contextvars.Context) -> None:
        self._calls = self._bytes = 0
        self._is_nested = context.get(running_call) is not None
        self.has_ended = False

    @classmethod
    def forget_all(cls) -> None:
        """Reset the counts of this process."""
        cls._lock = threading.Lock()
        cls._all_bytes = cls._all_running_bytes = 0
        cls._wakes = set()

    def admit(self, call: Call) -> str:
        """Count a call. Return the reason to refuse it, or an empty string."""
        with self._lock:
            self._calls += 1
            self._bytes += call.json_bytes
            CallLimit._all_bytes += call.json_bytes
            if self._calls > MAX_CALLS + MAX_WAITING_CALLS:
                return (
                    f"the code called functions of the host more than {MAX_CALLS + MAX_WAITING_CALLS:,} "
                    "times without waiting for an answer: make fewer calls at a time"
                )
            if self._all_bytes > MAX_UNANSWERED_BYTES and self._bytes > MIN_UNANSWERED_BYTES:
                return (
                    f"the code's calls to functions of the host hold {self._bytes:,} bytes, and calls of all "
                    f"executions here may hold {MAX_UNANSWERED_BYTES:,}: make fewer calls at a time, or pass paths"
                )
            return ""

    def begin(self, call: Call, wake: Callable[[], None]) -> bool:
        """Return True if the call may begin. Otherwise return False, and call `wake` when there may be room.

        `wake` raises RuntimeError if its event loop is closed.
        """
        has_priority = self._is_nested or call.parsed_bytes <= SMALL_BYTES
        with self._lock:
            is_only_one = not self._all_running_bytes
            has_room = self._all_running_bytes + call.parsed_bytes <= MAX_RUNNING_BYTES
            if not (has_priority or is_only_one or has_room):
                self._wakes.add(wake)
                return False
            CallLimit._all_running_bytes += call.parsed_bytes
            call.is_running = True
            return True

    def release(self, call: Call) -> None:
        """Count a call as answered or dropped, and wake the calls that wait for room."""
        with self._lock:
            self._calls -= 1
            self._bytes -= call.json_bytes
            CallLimit._all_bytes -= call.json_bytes
            if call.is_running:
                CallLimit._all_running_bytes -= call.parsed_bytes
        if self._wakes:
            self._wake_all()

    def end(self) -> None:
        """Record that the execution needs no further answers, and wake its waiting calls."""
        self.has_ended = True
        if self._wakes:
            self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            wakes = list(self._wakes)
            self._wakes.clear()
        for wake in wakes:
            with suppress(RuntimeError):  # The event loop of the call is closed.
                wake()


os.register_at_fork(after_in_child=CallLimit.forget_all)  # A fork of this process runs no calls.


class CallQueue:
    """A queue that begins the calls of one execution in order, on the event loop, within the limits of this module.

    Args:
        answer: Answers one call, and must not raise.
        context: The context of the execution's caller. Each call runs in a copy of it.
    """

    def __init__(self, answer: Callable[[Call], Coroutine[Any, Any, None]], context: contextvars.Context) -> None:
        self._answer = answer
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = CallLimit(context)
        self._open_since: float | None = None  # time of the loop since which there are unanswered calls
        self._open_seconds = 0.0

    @property
    def open_seconds(self) -> float:
        """Return the seconds in which there were unanswered calls."""
        since = self._open_since
        return self._open_seconds if since is None else self._open_seconds + self._loop.time() - since

    def add(self, call: Call) -> str:
        """Queue a call. If the call exceeds a limit, cancel all calls and return the reason, or else return ""."""
        if self._open_since is None:
            self._open_since = self._loop.time()
        self._waiting.append(call)
        refusal = self._limit.admit(call)
        if refusal:
            self.cancel()
        else:
            self._start_waiting()
        return refusal

    def cancel(self) -> None:
        """Cancel the running calls and discard the waiting ones."""
        while self._waiting:
            self._limit.release(self._waiting.popleft())
        for task in self._tasks:
            task.cancel()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._tasks) < MAX_CALLS:
            if not self._limit.begin(self._waiting[0], self._wake):
                return
            call = self._waiting.popleft()
            task = self._loop.create_task(self._answer(call), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, call))

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._start_waiting)

    def _end(self, call: Call, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._limit.release(call)
        self._start_waiting()
        if not self._tasks and not self._waiting:
            self._open_seconds, self._open_since = self.open_seconds, None
