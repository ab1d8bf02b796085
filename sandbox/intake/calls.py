"""Calls of the host's functions by code in a sandbox: how many run at a time, and how many may wait for their turn."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from ..wire.strict_json import MAX_CONTAINERS

MAX_CALLS = 256  # of one execution that run at a time; those of plain functions have a thread each
MAX_WAITING_CALLS = 10_000  # besides; a thread of the code waits for one at a time
MAX_CALLS_BYTES = 128 * 1024 * 1024  # of what the calls of one execution hand over, until each is answered
CALLS_AT_ONCE = 8  # that begin, or are answered, before the event loop does other things

Frame = tuple[dict[str, Any], bytes]


class CallLimit:
    """Counts the calls of one execution that are not answered yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = self._bytes = 0

    def admit(self, call: Frame) -> str:
        """Counts a call; what is wrong where there are too many, as a sentence for whoever wrote the code."""
        with self._lock:
            self._calls += 1
            self._bytes += len(call[1])
            if self._calls > MAX_CALLS + MAX_WAITING_CALLS:
                return (
                    f"the code has called functions of the host more than {MAX_CALLS + MAX_WAITING_CALLS:,} times "
                    "without waiting for an answer: call fewer at a time"
                )
            if self._bytes > MAX_CALLS_BYTES:
                return (
                    f"the code has called functions of the host with more than {MAX_CALLS_BYTES:,} bytes together that "
                    "are not answered yet: call fewer at a time, or hand over paths"
                )
            return ""

    def release(self, call: Frame) -> None:
        """Counts a call as answered."""
        with self._lock:
            self._calls -= 1
            self._bytes -= len(call[1])


class CallQueue:
    """Answers the calls of one execution, on the event loop: `MAX_CALLS` at a time, the others in their order.

    Fewer where their arguments have more than `MAX_CONTAINERS` lists and dicts together, for the garbage collector
    looks at all of them at once. `answer` answers one, in a copy of `context`, and raises nothing.
    """

    def __init__(self, answer: Callable[[Frame], Coroutine[Any, Any, None]], context: contextvars.Context) -> None:
        self._answer = answer
        self._context = context
        self._waiting: deque[Frame] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = CallLimit()
        self._containers = 0  # of the calls that are being answered
        self._is_starting = False

    def add(self, call: Frame) -> str:
        """Takes a call, to be answered soon; what is wrong where there are too many, as `CallLimit.admit` says it."""
        refusal = self._limit.admit(call)
        if refusal:
            self.cancel()
        else:
            self._waiting.append(call)
            if not self._is_starting:
                self._is_starting = True
                self._start_some()
        return refusal

    def cancel(self) -> None:
        """Ends those that run, and forgets those that wait."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _start_some(self) -> None:
        for _ in range(CALLS_AT_ONCE):
            containers = _count_containers(self._waiting[0]) if self._waiting else 0
            is_full = len(self._tasks) >= MAX_CALLS or (self._tasks and self._containers + containers > MAX_CONTAINERS)
            if not self._waiting or is_full:
                self._is_starting = False
                return
            call = self._waiting.popleft()
            self._containers += containers
            task = asyncio.get_running_loop().create_task(self._answer(call), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(lambda task, call=call, containers=containers: self._end(task, call, containers))
        asyncio.get_running_loop().call_soon(self._start_some)

    def _end(self, task: asyncio.Task[None], call: Frame, containers: int) -> None:
        self._tasks.discard(task)
        self._containers -= containers
        self._limit.release(call)
        if self._waiting and not self._is_starting:
            self._is_starting = True
            self._start_some()


def _count_containers(call: Frame) -> int:
    """The lists and dicts in a call's arguments, or more where its texts have such marks."""
    return call[1].count(b"[") + call[1].count(b"{")
