"""What a flow run reports as it goes: to its log, to its artifacts, and to a listener in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prefect.context import FlowRunContext

from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution
from ..cleanup.orphans import OrphanedSandbox

Log = logging.Logger | logging.LoggerAdapter[Any]


class FlowListener:
    """What a flow run tells whoever called it in this process; the methods do nothing unless overridden.

    It is handed over with the flow: `batch.with_listener(listener)`.
    """

    def on_start(self, total: int, environment: str, results_path: str) -> None:
        """The run is about to execute; `environment` is the isolation in force, or the work pool of its shards."""

    def on_warning(self, text: str) -> None:
        """There is something that a person should know, in a sentence."""

    def on_execution_start(self, index: int) -> None:
        """An execution's task run has started."""

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        """An execution has its outcome; `cached` where it was read from a ledger and not run."""

    def on_orphans(self, orphans: Sequence[OrphanedSandbox]) -> None:
        """The reap flow has removed these sandboxes, or would."""


class OutcomeSink(Protocol):
    """Takes each outcome once, as it comes."""

    def add_outcome(self, outcome: Outcome) -> None:
        """Takes one outcome."""
        ...


class EventPublisher:
    """Passes each event of one flow run on to its log, to a listener and to an `artifacts` sink, if there is one."""

    def __init__(
        self,
        log: Log,
        *,
        label: Callable[[Execution], str],
        listener: FlowListener | None = None,
        artifacts: OutcomeSink | None = None,
    ) -> None:
        self.log = log
        self._label = label
        self._listener = FlowListener() if listener is None else listener
        self._artifacts = artifacts

    def publish_start(self, total: int, environment: str, results_path: str) -> None:
        """The run is about to execute."""
        self._listener.on_start(total, environment, results_path)

    def publish_warning(self, text: str) -> None:
        """A person should know this."""
        self.log.warning("%s", text)
        self._listener.on_warning(text)

    def publish_execution_start(self, index: int) -> None:
        """An execution's task run has started."""
        self._listener.on_execution_start(index)

    def publish_outcome(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """An execution has its outcome."""
        if isinstance(outcome, Failure):
            error = outcome.error
            self.log.warning("%s failed: %s: %s", self._label(execution), type(error).__name__, error.summary)
        if self._artifacts is not None:
            self._artifacts.add_outcome(outcome)
        self._listener.on_outcome(outcome, cached=cached)


def find_listener() -> FlowListener | None:
    """The listener that the flow of the current flow run was given; None where it has none."""
    context = FlowRunContext.get()
    return None if context is None else getattr(context.flow, "listener", None)
