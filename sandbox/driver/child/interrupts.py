"""Interrupts: raised between two instructions of the code, never inside what the driver does for it."""

from __future__ import annotations

from ..processes import signal
from .submit import Submitted


class Interrupted(KeyboardInterrupt):
    """Ends an execution that has outlived its timeout or was cancelled."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class InterruptShield:
    """Handles SIGINT for the code; what the main thread does in it is not interrupted.

    `is_running` says whether code runs, `has_submitted` whether it has handed something back.
    """

    def __init__(self) -> None:
        import _thread

        self.get_thread_id = _thread.get_ident
        self.main_thread = _thread.get_ident()
        self.is_running = False
        self.has_submitted = False
        self._depth = 0
        self._is_pending = False
        signal.signal(signal.SIGINT, self._on_interrupt)

    def reset(self) -> None:
        """Forgets the last execution."""
        self.has_submitted = self._is_pending = False

    def __enter__(self) -> None:
        if self.get_thread_id() == self.main_thread:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Raises an interrupt that came meanwhile."""
        if self.get_thread_id() == self.main_thread:
            self._depth -= 1
            if self._is_pending and not self._depth:
                self._raise()

    def _on_interrupt(self, _number: int, _frame: object) -> None:
        if not self.is_running:
            return
        if self._depth:
            self._is_pending = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_pending = False
        if self.has_submitted:
            raise Submitted
        raise Interrupted
