"""The event loop for code that awaits at its top level, as in a notebook.

`asyncio` is imported only for such code.
"""

from __future__ import annotations

from ..channel import Interrupted
from ..submit import Submitted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

IS_COROUTINE = 0x80  # inspect.CO_COROUTINE


async def _await_codes(codes: list[CodeType], namespace: dict[str, Any]) -> Any:
    value = None
    for code in codes:
        value = eval(code, namespace)
        if code.co_flags & IS_COROUTINE:
            value = await value
    return value


class CoroutineRunner:
    """A runner of coroutines on one event loop, which stays open until `close` and does not run between coroutines."""

    def __init__(self) -> None:
        self._loop: Any = None

    def run(self, codes: list[CodeType], namespace: dict[str, Any]) -> Any:
        """Run pieces of code in order; return the value of the last one if it is an expression.

        SUBMIT and an interrupt break out of the loop, from whichever task. Then the main task is cancelled.
        """
        import asyncio

        loop = self._open_loop()
        main = loop.create_task(_await_codes(codes, namespace))
        try:
            return loop.run_until_complete(main)
        except BaseException as error:
            if not main.done():
                main.cancel()
                try:
                    loop.run_until_complete(main)
                except asyncio.CancelledError as cancelled:
                    if isinstance(error, Interrupted):
                        error.__traceback__ = cancelled.__traceback__  # has the place where the code waited
                except BaseException:
                    pass  # the code's own error in a `finally` block, or another interrupt
            error.__traceback__ = _skip_loop(error.__traceback__)
            raise

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


def silence_own_errors(base_events: Any) -> None:
    """Keep event loops from reporting tasks that SUBMIT or an interrupt ended, which are no errors of the code."""
    handle = base_events.BaseEventLoop.default_exception_handler

    def default_exception_handler(self: Any, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), (Submitted, Interrupted)):
            handle(self, context)

    base_events.BaseEventLoop.default_exception_handler = default_exception_handler


def _skip_loop(trace: Any) -> Any:
    """Return the part of a traceback after the frames of this module and asyncio."""
    while trace is not None and trace.tb_frame.f_globals.get("__package__") in (__package__, "asyncio"):
        trace = trace.tb_next
    return trace
