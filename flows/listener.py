"""The listeners of a flow run: the events for the program that calls a flow, and a notebook's progress."""

import html
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..sandbox.queries.records import RlmEvent
from ..sandbox.result import Outcome

if TYPE_CHECKING:
    from .orphans import OrphanedSandbox
    from .reporting.summary import RunSummary

UPDATE_INTERVAL_SECONDS = 0.2  # seconds between two updates, each of which is a message to the browser


class FlowListener:
    """A receiver of a flow run's events, for `BatchFlow.call`. The methods do nothing unless overridden."""

    def on_prefect_start(self) -> None:
        """Handle the beginning of the wait for a Prefect server. The parameters have been checked."""

    def on_start(self, total: int, environment: str, results_path: str, summary: "RunSummary", run_name: str) -> None:
        """Handle the start of the executions.

        Args:
            total: The number of executions.
            environment: A phrase such as "in local sandboxes (bubblewrap)" or "in 4 shards on the work pool NAME".
            results_path: The path or location of the results.
            summary: The summary of the outcomes so far. It has each outcome before `on_outcome` gets it.
            run_name: The name of the flow run.
        """

    def on_page(self, page: str) -> None:
        """Handle the address of the run's page on the shared server and how to sign in, before the executions start."""

    def on_warning(self, text: str) -> None:
        """Handle a warning for people, a sentence."""

    def on_execution_start(self, index: int) -> None:
        """Handle the start of an execution in this process. A cached execution has only an outcome."""

    def on_output(self, index: int, stream: str, text: str) -> None:
        """Handle text that an execution's code has written to `stream`, which is "stdout" or "stderr"."""

    def on_rlm_event(self, index: int, event: RlmEvent) -> None:
        """Handle an event of a recursive query that an execution's code asked."""

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        """Handle the outcome of an execution. It is `cached` if it comes from a ledger and nothing ran."""

    def on_orphans(self, orphans: "Sequence[OrphanedSandbox]") -> None:
        """Handle the sandboxes that the reap flow has removed, or would remove in a dry run."""


class NotebookProgress(FlowListener):
    """A listener that shows the number of executions that are done."""

    def __init__(self) -> None:
        self._summary: RunSummary | None = None
        self._display: Any = None  # IPython's handle of the progress bar
        self._total = 0
        self._updated_at = time.monotonic()

    def on_start(self, total: int, environment: str, results_path: str, summary: "RunSummary", run_name: str) -> None:
        from IPython.display import display

        self._total, self._summary = total, summary
        self._display = display(self._render(summary), raw=True, display_id=True)

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        summary, now = self._summary, time.monotonic()
        if summary is None:
            return
        if summary.done >= self._total or now >= self._updated_at + UPDATE_INTERVAL_SECONDS:
            self._updated_at = now
            self._display.update(self._render(summary), raw=True)

    def _render(self, summary: "RunSummary") -> dict[str, str]:
        text = summary.describe(self._total)
        bar = f'<progress value="{summary.done}" max="{max(1, self._total)}"></progress>'
        return {"text/plain": text, "text/html": f"<div>{bar} {html.escape(text)}</div>"}


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and not IPython in a terminal."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None
