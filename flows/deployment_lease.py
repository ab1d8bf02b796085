"""The lease of a deployment's concurrency limit, which Prefect's engine holds for a flow run.

Prefect renews the lease every 225 s, and cancels the run if the server does not know it any more. A server that keeps
leases in memory, the default, forgets them when it restarts, but still counts the run's slot and frees it when the run
ends. So our flow runs continue. Flow runs of others are not changed.
"""

import functools
import sys
from typing import Any

from prefect import Flow
from prefect.context import FlowRunContext

ENGINE = "prefect.flow_engine"
FUNCTION = "amaintain_concurrency_lease"  # It has no setting, and the engine calls no method of a flow before it.


def keep_runs_without_lease(flow_class: type[Flow[Any, Any]]) -> None:
    """Let the runs of flows of this class continue when the server has lost the lease of their deployment's limit.

    Only the process of a deployment's run holds such a lease. It has imported the engine before it loads the flow.
    """
    engine = sys.modules.get(ENGINE)
    original = getattr(engine, FUNCTION, None)
    if original is None or hasattr(original, "__wrapped_by_rlm_batch__"):
        return

    @functools.wraps(original)
    def maintain(*args: Any, **options: Any) -> Any:
        context = FlowRunContext.get()
        if context is not None and isinstance(context.flow, flow_class):
            options |= {"raise_on_lease_renewal_failure": False, "suppress_warnings": True}
        return original(*args, **options)

    vars(maintain)["__wrapped_by_rlm_batch__"] = True
    setattr(engine, FUNCTION, maintain)
