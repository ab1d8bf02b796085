"""Functions that plan a flow's executions without running them."""

from typing import Any

from rlm_batch.flows.plans.batch import BatchParameters
from rlm_batch.flows.plans.sequence import SequenceParameters
from rlm_batch.flows.plans.sweep import SweepParameters


def plan_batch(code: Any, inputs: Any = None) -> list[tuple[str, dict[str, Any]]]:
    """Return the code and the variables of each execution of a batch."""
    return list(BatchParameters.parse({"code": code, "inputs": inputs}).make_plan().items)


def plan_steps(steps: Any) -> list[str]:
    """Return the code of each step of a sequence."""
    return [code for code, _ in SequenceParameters.parse({"steps": steps}).make_plan().items]


def plan_points(points: Any) -> list[dict[str, Any]]:
    """Return the variables of each trial of a sweep."""
    return [variables for _, variables in SweepParameters.parse({"code": "pass", "points": points}).make_plan().items]
