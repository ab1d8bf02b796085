"""A recursive query's record as a trajectory of the Agent Trajectory Interchange Format (Harbor's RFC 0001).

A turn of the model is a step: its reasoning, its code as a call of the tool `python`, and what that printed as the
observation. Recursive queries that its code asked are trajectories inside it, and flat ones stand with the observation.
"""

import math
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from ....sandbox.queries.session import RECORDED_CHARACTERS

SCHEMA_VERSION = "ATIF-v1.7"  # the first with trajectories inside others; what later ones add is not used here
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python in a sandbox. Names persist from call to call, and SUBMIT(answer=...) ends it.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
COUNTS = ("calls", "prompt_tokens", "completion_tokens")  # of a record and of a turn's usage
FLAT_FIELDS = ("model", "prompt", "seconds", *COUNTS, "cost", "error")  # of a flat query that a trajectory has

Json = dict[str, Any]


def build_trajectory(
    record: Json, trajectory_id: str, session_id: str | None = None, *, question: str | None = None, answer: str = ""
) -> Json:
    """The trajectory of a recursive query's record.

    `question` is the whole of what was asked, where that is known: a record has its beginning. `answer` is what the
    model answered, where that is known.
    """
    turns = record.get("trajectory", [])
    children = [child for child in record.get("queries", []) if child["kind"] == "rlm_query"]
    subagents = [build_trajectory(child, f"{trajectory_id}.{number}") for number, child in enumerate(children, 1)]
    last = len(turns)
    asked_in: dict[int, list[Json]] = {}  # by a turn's number: the queries of its code
    for child in record.get("queries", []):
        asked_in.setdefault(min(child["turn"], last), []).append(child)
    ids = {id(child): subagent["trajectory_id"] for child, subagent in zip(children, subagents, strict=True)}

    is_cut = question is None and len(record["prompt"]) == RECORDED_CHARACTERS
    steps: list[Json] = [{"source": "user", "message": record["prompt"] if question is None else question}]
    steps += [_build_step(turn, number, asked_in.get(number, []), ids) for number, turn in enumerate(turns, 1)]
    rest = _subtract_turns(record, turns)
    if record.get("error"):
        steps.append({"source": "system", "message": f"There was no answer: {record['error']}"})
    elif rest is not None and rest["calls"]:  # it was asked once more, for an answer from all that it had seen
        steps.append({"source": "agent", "message": answer, **_build_metrics(rest)})
    note = f"What was asked is cut after {RECORDED_CHARACTERS} characters, as the ledger has it." if is_cut else None
    return _without_none(
        schema_version=SCHEMA_VERSION,
        session_id=session_id,
        trajectory_id=trajectory_id,
        agent={
            "name": "rlm-batch",
            "version": version("rlm-batch"),
            "model_name": record["model"],
            "tool_definitions": [TOOL],
        },
        steps=[{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        notes=note,
        final_metrics=_build_final_metrics(record, len(steps)),
        subagent_trajectories=subagents or None,
    )


def _build_step(turn: Json, number: int, queries: list[Json], ids: dict[int, str]) -> Json:
    call_id = f"call_{number}"
    flat = [_pick(query, FLAT_FIELDS) for query in queries if id(query) not in ids]
    extra = {**({"llm_queries": flat} if flat else {}), **({"failed": True} if turn.get("failed") else {})}
    refs = [{"trajectory_id": ids[id(query)]} for query in queries if id(query) in ids]
    observation = _without_none(
        source_call_id=call_id,
        content=turn.get("output") or "",
        subagent_trajectory_ref=refs or None,
        extra=extra or None,
    )
    usage = turn.get("usage")
    return _without_none(
        source="agent",
        message="",
        reasoning_content=turn.get("reasoning") or None,
        tool_calls=[
            {"tool_call_id": call_id, "function_name": "python", "arguments": {"code": turn.get("code") or ""}}
        ],
        observation={"results": [observation]},
        **(_build_metrics(usage) if usage and usage["calls"] else {}),
    )


def _build_metrics(usage: Json) -> Json:
    """A step's metrics, and how many calls of the model they are of."""
    metrics = _without_none(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cost_usd=_read_cost(usage),
    )
    return {"metrics": metrics, "llm_call_count": usage["calls"]}


def _build_final_metrics(record: Json, steps: int) -> Json:
    """The format wants the tokens of the trajectory's own steps, and the cost of all that is below it as well."""
    below = list(_list_queries(record.get("queries", [])))
    costs = [_read_cost(query) for query in (record, *below)]
    known = [cost for cost in costs if cost is not None]
    extra: Json = {"llm_calls": record["calls"], "seconds": record["seconds"]}
    if below:
        extra["queries"] = {"count": len(below), **{name: sum(query[name] for query in below) for name in COUNTS}}
    return _without_none(
        total_prompt_tokens=record["prompt_tokens"],
        total_completion_tokens=record["completion_tokens"],
        total_cost_usd=sum(known) if len(known) == len(costs) else None,
        total_steps=steps,
        extra=extra,
    )


def _list_queries(records: Iterable[Json]) -> Iterable[Json]:
    for record in records:
        yield record
        yield from _list_queries(record.get("queries", []))


def _subtract_turns(record: Json, turns: list[Json]) -> Json | None:
    """Return what the query used beside its turns, or None if a turn's own use is unknown."""
    usages: list[Json] = [turn["usage"] for turn in turns if "usage" in turn]
    if len(usages) != len(turns):
        return None
    rest: Json = {name: max(0, record[name] - sum(usage[name] for usage in usages)) for name in COUNTS}
    costs = [_read_cost(usage) for usage in (record, *usages)]
    known = [cost for cost in costs if cost is not None]
    rest["cost"] = max(0.0, known[0] - sum(known[1:])) if len(known) == len(costs) else None
    return rest


def _read_cost(usage: Json) -> float | None:
    """US dollars; None where they are unknown, or no number that JSON has."""
    cost = usage["cost"]
    return float(cost) if cost is not None and math.isfinite(cost) else None


def _pick(record: Json, names: Iterable[str]) -> Json:
    return {name: record[name] for name in names if name in record}


def _without_none(**fields: Any) -> Json:
    """The fields that there are: the format has no null."""
    return {name: value for name, value in fields.items() if value is not None}
