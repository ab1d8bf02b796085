"""A flow whose events a test receives."""

import inspect
from typing import Any

from rlm_batch.flows.listener import FlowListener
from rlm_batch.flows.run import call_flow
from rlm_batch.flows.run_state import RunState


async def run_with_listener(flow: Any, listener: FlowListener, *args: Any, **parameters: Any) -> Any:
    """Run the flow and return its result; the listener receives the run's events."""
    values = dict(inspect.signature(flow.fn).bind(*args, **parameters).arguments)
    state = RunState(listener=listener)
    if flow.model is None:
        return await flow.call_function(values, state)
    return await call_flow(flow, flow.model.parse(values), state)
