"""Contexts: children that stay, whose globals persist from one execution to the next."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child_process import ChildProcess


class Contexts:
    """Which child holds which context, and why those that have ended did."""

    def __init__(self) -> None:
        self._processes: dict[str, ChildProcess] = {}
        self._losses: dict[str, str] = {}

    def find_process(self, name: str | None) -> ChildProcess | None:
        return None if name is None else self._processes.get(name)

    def find_loss(self, name: str | None) -> str | None:
        """Why the state of that context is lost; None where it is not."""
        return None if name is None else self._losses.get(name)

    def add(self, name: str, process: ChildProcess) -> None:
        process.context = name
        self._processes[name] = process

    def forget(self, name: str) -> ChildProcess | None:
        """Lets the name begin anew; returns the child that held it."""
        self._losses.pop(name, None)
        return self._processes.pop(name, None)

    def record_end(self, process: ChildProcess, exit_code: int | None, signal_number: int | None) -> None:
        """Notes that a child has ended, if it held a context."""
        if process.context is not None and self._processes.get(process.context) is process:
            del self._processes[process.context]
            end = f"was killed by signal {signal_number}" if signal_number else f"exited with status {exit_code}"
            self._losses[process.context] = f"the process that held the state {end}"
