"""A flow whose events a test receives."""

from typing import Any

from rlm_batch.flows.listener import FlowListener


async def run_with_listener(flow: Any, listener: FlowListener, *args: Any, **parameters: Any) -> Any:
    """Run the flow and return its result; the listener receives the run's events."""
    return await flow.call(args, parameters, listener)
