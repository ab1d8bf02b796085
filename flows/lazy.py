"""The lazy definition of a flow, for modules that are imported before Prefect."""

import sys
from collections.abc import Callable
from typing import Any

from .parameters import FlowParameters


def define_lazily(model: type[FlowParameters[Any]]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which defines the model's flow when it is first asked for.

    The flow is a Prefect flow, and Prefect takes a second to import. The command line reads parameter models and makes
    plans without it.
    """

    def get_attribute(name: str) -> Any:
        if name != model.flow_name:
            raise AttributeError(f"module {model.__module__!r} has no attribute {name!r}")
        from .prefect_flow import define_flow

        flow = define_flow(model)
        setattr(sys.modules[model.__module__], name, flow)
        return flow

    return get_attribute
