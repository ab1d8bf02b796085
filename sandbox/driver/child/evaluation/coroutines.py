"""The event loop for code that awaits at its top level, as in a notebook.

`asyncio` is imported only for such code.
"""

from __future__ import annotations

from ..channel import Interrupted
from ..submit import Submitted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import CodeType
    from typing import Any

    from ..channel import InterruptShield

IS_COROUTINE = 0x80  # inspect.CO_COROUTINE


async def await_codes(codes: list[CodeType], namespace: dict[str, Any]) -> Any:
    """Run pieces of code in order; return the value of the last one if it is an expression."""
    value = None
    for code in codes:
        value = eval(code, namespace)
        if code.co_flags & IS_COROUTINE:
            value = await value
    return value


class CoroutineRunner:
    """A runner of coroutines on one event loop, which stays open until `close` and does not run between coroutines."""

    def __init__(self, shield: InterruptShield) -> None:
        self._shield = shield
        self._loop: Any = None
        self._main: Any = None  # the current task
        self._is_cancelled = False  # this class cancelled the task after an interrupt or an error outside the task

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine and return its value. Raises its exception, or the one that interrupted it."""
        import asyncio

        loop = self._open_loop()
        outcome = _Outcome()
        main = self._main = loop.create_task(_settle(coroutine, outcome))

        def stop(_task: object) -> None:
            loop.stop()

        main.add_done_callback(stop)
        self._is_cancelled, self._shield.cancel_wait = False, self._cancel_wait
        try:
            error = self._complete()
        finally:
            self._shield.cancel_wait = self._main = None
        if self._is_cancelled:
            if error is None:
                error = Submitted() if self._shield.has_submitted else Interrupted()
                error.__traceback__ = None if outcome.error is None else outcome.error.__traceback__
            raise error
        if outcome.error is not None:
            raise outcome.error
        if main.cancelled():
            raise asyncio.CancelledError
        return outcome.value

    def close(self, *, joins_threads: bool) -> None:
        """Cancel the remaining tasks and close the loop, as `asyncio.run` does; join its threads if asked."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        import asyncio

        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        if joins_threads:
            loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()

    def _open_loop(self) -> Any:
        import asyncio

        loop = self._loop
        if loop is None or loop.is_closed():  # the code may have closed it
            loop = self._loop = asyncio.new_event_loop()
        else:
            # A new executor, because a thread and its output belong to the execution that started the thread.
            from concurrent.futures import ThreadPoolExecutor

            loop.set_default_executor(ThreadPoolExecutor())
        asyncio.set_event_loop(loop)  # `asyncio.run` in earlier code unsets it
        return loop

    def _complete(self) -> BaseException | None:
        """Run the loop until the task is done; return an exception raised elsewhere, such as in another task."""
        error: BaseException | None = None
        while not self._main.done():
            try:
                self._loop.run_forever()
            except BaseException as raised:
                error = raised
                error.__traceback__ = _skip_loop(error.__traceback__)
                if self._is_cancelled:  # the task does not end, and this loop is no longer usable
                    self._loop = None
                    break
                self._cancel()
        return error

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._main.cancel()

    def _cancel_wait(self) -> bool:
        """Cancel the task on an interrupt that comes while no task runs; return whether this was done."""
        import asyncio

        if self._is_cancelled or asyncio.current_task(self._loop) is not None:
            return False
        self._cancel()
        self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which would otherwise keep waiting
        return True


def silence_own_errors(base_events: Any) -> None:
    """Keep event loops from reporting tasks that SUBMIT or an interrupt ended, which are no errors of the code."""
    handle = base_events.BaseEventLoop.default_exception_handler

    def default_exception_handler(self: Any, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), (Submitted, Interrupted)):
            handle(self, context)

    base_events.BaseEventLoop.default_exception_handler = default_exception_handler


class _Outcome:
    value: Any = None
    error: BaseException | None = None


async def _settle(coroutine: Coroutine[Any, Any, Any], outcome: _Outcome) -> None:
    """Record the coroutine's outcome and raise nothing: SystemExit would break out of the loop."""
    try:
        outcome.value = await coroutine
    except BaseException as error:
        outcome.error = error


def _skip_loop(trace: Any) -> Any:
    """Return the part of a traceback after the frames of this module and asyncio."""
    while trace is not None and trace.tb_frame.f_globals.get("__package__") in (__package__, "asyncio"):
        trace = trace.tb_next
    return trace
