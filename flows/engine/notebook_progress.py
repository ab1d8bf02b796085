"""The progress of a flow run in a notebook: one display below the cell, which is updated."""

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from ...sandbox.result import Outcome
from ...tasks.ledger.run_record import ReportSpec
from ..listener import FlowListener

UPDATE_INTERVAL_SECONDS = 0.2  # seconds between two updates, each of which is a message to the browser


class NotebookProgress(FlowListener):
    """A listener that shows the number of executions that are done. `describe` returns it in words."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._handle: Any = None
        self._total = self._done = 0
        self._updated_at = time.monotonic()

    def on_start(self, total: int, environment: str, results_path: str, report_spec: ReportSpec) -> None:
        from IPython.display import display

        self._total = total
        self._handle = display(self._render(), raw=True, display_id=True)

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done < self._total and now < self._updated_at + UPDATE_INTERVAL_SECONDS:
            return
        self._updated_at = now
        if self._handle is not None:
            self._handle.update(self._render(), raw=True)

    def _render(self) -> dict[str, str]:
        text = self._describe()
        bar = f'<progress value="{self._done}" max="{max(1, self._total)}"></progress>'
        return {"text/plain": text, "text/html": f"<div>{bar} {html.escape(text)}</div>"}


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and not IPython in a terminal."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None
