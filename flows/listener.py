"""The listener of a flow run: what a program that calls a flow learns while the flow runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sandbox.result import Outcome
from ..tasks.ledger.run_record import ReportSpec

if TYPE_CHECKING:
    from .cleanup.orphans import OrphanedSandbox


class FlowListener:
    """The events of a flow run in this process. The methods do nothing unless overridden.

    `flows.run.run` takes a listener.
    """

    def on_prefect_start(self) -> None:
        """Handle the wait for Prefect's server, once the parameters, the provider and the model have been checked."""

    def on_start(self, total: int, environment: str, results_path: str, report_spec: ReportSpec) -> None:
        """The run is about to execute.

        Args:
            total: The number of executions.
            environment: The isolation in force, or the work pool of the run's shards.
            results_path: The ledger.
            report_spec: What an execution is called, and the objectives.
        """

    def on_warning(self, text: str) -> None:
        """There is something that a person should know, in a sentence."""

    def on_execution_start(self, index: int) -> None:
        """An execution's task run has started."""

    def on_output(self, index: int, stream: str, text: str) -> None:
        """An execution's code has written that to `stream`, "stdout" or "stderr"."""

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        """An execution has its outcome; `cached` where it was read from a ledger and not run."""

    def on_orphans(self, orphans: "Sequence[OrphanedSandbox]") -> None:
        """The reap flow has removed these sandboxes, or would."""
