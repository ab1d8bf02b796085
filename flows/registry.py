"""The flows that execute code, by name. The command line makes a command of each, in this order.

A flow's model is imported when it is first used, because pydantic takes tens of milliseconds to build each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .parameters import FlowParameters
    from .prefect_flow import BatchFlow

# One line for `rlm-batch --help` by the name of each flow.
FLOWS = {
    "batch": "Run Python files, or one file over many inputs, in sandboxes.",
    "sweep": "Run a Python file over --grid, --points or --space; find the best.",
    "chunks": "Run one Python file on chunks of data, and reduce the results.",
    "sequence": "Run Python files in order in one sandbox with shared state.",
    "rlm": "Ask a recursive language model about a text of any length.",
    "check": "Judge what a run did with another check; run no code again.",
}


def load_model(name: str) -> "type[FlowParameters[Any]]":
    """Import and return the parameter model of a flow, such as `BatchParameters` of `batch`."""
    return getattr(import_module(f".plans.{name}", __package__), f"{name.title()}Parameters")


def load_flow(name: str) -> "BatchFlow[..., Any]":
    """Import Prefect and the flow of that name, and return the flow."""
    return getattr(import_module(f".{name}", __package__), name)
