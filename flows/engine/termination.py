"""A handler of SIGTERM that cancels the process's flow runs, instead of raising an exception at any point."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.exceptions import TerminationSignal

from ..prefect_patches import handle_sigterm


@dataclass(eq=False)
class _Run:
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    is_terminated: bool = False

    def terminate(self) -> None:
        """Cancel the task once: a second signal must not interrupt the cleanup after the first."""
        if self in _runs and not self.is_terminated:
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


handle_sigterm(_handle_sigterm)
