"""The state of one flow run in this process, in a context variable: its plan, its listener and its outcome."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan import Plan

if TYPE_CHECKING:
    from ..blocks.provider import SandboxProvider
    from .engine.run_outcome import RunOutcome
    from .listener import FlowListener
    from .parameters import FlowParameters
    from .reports import Report


@dataclass(slots=True)
class RunState:
    """The state shared by a flow run and its caller: inputs from the caller, and results for it.

    Args:
        parameters: The checked parameters; None if the run parses them, as in a worker.
        plan: The plan that was made before Prefect started; None if the run makes it, as in a worker.
        listener: Receives the run's events.
        provider: The provider, if it was checked before Prefect started.
        environment: A phrase such as "in local sandboxes (bubblewrap)", if the provider was checked.
        is_model_checked: The language model's first call was checked.
        results_path: The ledger, as soon as the run has one.
        outcome: The counts and the message of a run that has ended.
        report: The report of a run that has ended.
        ui_url: The address of the UI of the shared server, if the run uses it.
        run_id: The flow run that took this state. Another run in the same context gets a new state.
    """

    parameters: "FlowParameters[Any] | None" = None
    plan: Plan | None = None
    listener: "FlowListener | None" = None
    provider: "SandboxProvider | None" = None
    environment: str = ""
    is_model_checked: bool = False
    results_path: str | None = None
    outcome: "RunOutcome | None" = None
    report: "Report | None" = None
    ui_url: str | None = None
    run_id: str = ""


_current: ContextVar[RunState | None] = ContextVar("rlm_batch_run_state", default=None)


def get_run_state(run_id: str) -> RunState:
    """Return the state of the current flow run, or a new state if Prefect started the run, as in a worker."""
    state = _current.get()
    if state is None or state.run_id not in ("", run_id):
        state = RunState()
        _current.set(state)
    state.run_id = run_id
    return state


@contextmanager
def use_run_state(state: RunState) -> Iterator[RunState]:
    """Use this state for the flow run that starts in the context."""
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)
