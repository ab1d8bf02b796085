"""SIGTERM, which cancels the flow runs of a process rather than raising in the middle of whatever runs there."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.exceptions import TerminationSignal
from prefect.utilities import engine


@dataclass(eq=False)
class _Run:
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    is_terminated: bool = False

    def terminate(self) -> None:
        """Cancels the task, once: a second signal must not cut short what the first has begun."""
        if self in _runs and not self.is_terminated:
            self.is_terminated = True
            self.task.cancel()


_runs: list[_Run] = []


@contextmanager
def cancel_at_termination() -> Iterator[None]:
    """Cancels the calling task at SIGTERM, and raises Prefect's TerminationSignal once all is closed inside.

    Prefect's own handler raises that wherever the main thread is, in the middle of a sandbox's removal too, and what it
    hits there is left undone. From there on all is Prefect's again: the run's state, and the end of the process.
    """
    task = asyncio.current_task()
    assert task is not None
    run = _Run(asyncio.get_running_loop(), task)
    _runs.append(run)
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


def _handle_sigterm(number: int, _frame: object) -> None:
    runs = list(_runs)
    if not runs:
        raise TerminationSignal(signal=number)
    for run in runs:
        run.loop.call_soon_threadsafe(run.terminate)


# By Prefect's name for it: it installs the handler of that name, and takes a cancellation by its worker for one only
# where it finds that installed.
if hasattr(engine, "_prefect_sigterm_handler"):
    engine._prefect_sigterm_handler = _handle_sigterm  # type: ignore[assignment]
