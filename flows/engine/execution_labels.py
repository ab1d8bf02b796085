"""The names of executions: what their task runs are called, and how logs speak of them."""

from collections.abc import Callable

from ...sandbox.outcomes.text_escape import escape_text
from ...tasks.execution import Execution
from ..reporting.table import format_variables

Label = Callable[[Execution], str]
LENGTH = 120  # characters of what tells one from another


def execution_label(execution: Execution) -> str:
    """Return a label with the execution's number."""
    return f"execution {execution.index}"


def trial_label(execution: Execution) -> str:
    """Return a label with the trial's number and the values of its variables."""
    return f"trial {execution.index}: {_cut(format_variables(execution.variables))}"


def step_label(execution: Execution) -> str:
    """Return a label with the step's number."""
    return f"step {execution.index}"


def chunk_label(execution: Execution) -> str:
    """Return a label with the chunk's id, or "reduce" for the execution without a chunk."""
    if "chunk_id" not in execution.variables:
        return "reduce"
    return f"chunk {_cut(escape_text(execution.variables['chunk_id']))}"


def _cut(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 3]}..."


LABELS = {"execution": execution_label, "trial": trial_label, "chunk": chunk_label}
