"""The listener of a flow run: what the run tells its caller in this process."""

from collections.abc import Sequence
from typing import Any

from prefect.context import FlowRunContext

from ...sandbox.result import Outcome
from ..cleanup.orphans import OrphanedSandbox


class FlowListener:
    """A listener that ignores everything: override the methods, and pass it with `batch.with_listener(listener)`."""

    def on_start(self, total: int, environment: str, results_path: str) -> None:
        """Handle the start of the run; `environment` is the isolation in force, or the work pool of its shards."""

    def on_warning(self, text: str) -> None:
        """Show a sentence that a person should read."""

    def on_execution_start(self, index: int) -> None:
        """Handle the start of an execution's task run."""

    def on_output(self, index: int, stream: str, text: str) -> None:
        """Show text that an execution's code wrote to `stream`, "stdout" or "stderr"."""

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        """Handle the outcome of an execution; `cached` if it was read from a ledger and not run."""

    def on_orphans(self, orphans: Sequence[OrphanedSandbox]) -> None:
        """Show the sandboxes that the reap flow removed, or would remove."""


def announce_results_path(path: str) -> None:
    """Store the path of the results on the current flow, for its caller to read."""
    context = FlowRunContext.get()
    flow: Any = None if context is None else context.flow
    if hasattr(flow, "results_path"):
        flow.results_path = path


def find_listener() -> FlowListener | None:
    """Return the listener that the current flow was given, if any."""
    context = FlowRunContext.get()
    return None if context is None else getattr(context.flow, "listener", None)
