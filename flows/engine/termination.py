"""The end of runs whose process is terminated or interrupted: they are cancelled, and remove their sandboxes."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.exceptions import TerminationSignal

from ..prefect_patches import handle_sigterm

WATCH_SECONDS = 0.2  # seconds between two looks at the main thread


@dataclass(eq=False)
class _Run:
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    is_terminated: bool = False

    def terminate(self) -> None:
        """Cancel the task, unless it has ended meanwhile."""
        if self in _runs:
            self.is_terminated = True
            self.task.cancel()


_runs: list[_Run] = []


@contextmanager
def cancel_at_termination() -> Iterator[None]:
    """Cancel the calling task at SIGTERM. At the end of the context, raise Prefect's TerminationSignal.

    Then Prefect sets the run's state and ends the process as usual. Prefect's own handler would raise at any point of
    the main thread, and might interrupt the removal of a sandbox.
    """
    task = asyncio.current_task()
    assert task is not None
    run = _Run(asyncio.get_running_loop(), task)
    _runs.append(run)
    handle_sigterm(_handle_sigterm)  # Without runs it does what Prefect's handler does.
    try:
        yield
    except asyncio.CancelledError:
        if not run.is_terminated:
            raise
    finally:
        _runs.remove(run)
    if run.is_terminated:
        task.uncancel()
        raise TerminationSignal(signal=signal.SIGTERM)


async def cancel_at_interrupt(task: asyncio.Task[Any]) -> None:
    """Cancel a task of another thread once SIGTERM or Ctrl-C ends the flow in the main thread.

    Prefect waits for the tasks of `submit` and `map` then, and does not cancel them.
    """
    earlier = previous = _read_main_exception()
    while threading.current_thread() is not threading.main_thread():
        await asyncio.sleep(WATCH_SECONDS)
        current = _read_main_exception()
        is_lasting = current is previous and current is not earlier  # A time-out's exception is soon gone.
        if is_lasting and isinstance(current, (KeyboardInterrupt, TerminationSignal, asyncio.CancelledError)):
            task.cancel()
            return
        previous = current


def _read_main_exception() -> BaseException | None:
    """Return the exception that the main thread handles now, as while it leaves contexts because of the exception."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return handled[1] if isinstance(handled, tuple) else handled  # Python 3.11 has a tuple.


def _handle_sigterm(number: int, _frame: object) -> None:
    # A second signal must not interrupt the cleanup and the report of the state. systemd sends SIGTERM to all processes
    # of a unit, and a worker sends it to its flow runs, too.
    signal.signal(number, lambda *_: None)
    runs = list(_runs)
    if not runs:
        raise TerminationSignal(signal=number)
    for run in runs:
        run.loop.call_soon_threadsafe(run.terminate)
