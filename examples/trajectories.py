"""The trajectories of a run's recursive queries, in the Agent Trajectory Interchange Format (ATIF, Harbor's RFC 0001).

python examples/trajectories.py RUN DIRECTORY      # RUN: the id or name of a run, or the path of its results

A turn of the model is a step: its reasoning, its code as a call of the tool `python`, and the output. Flat queries of
the code are part of the output's observation. Recursive ones are trajectories inside it.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlm_batch import load_report

Json = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python in a sandbox. Names persist from call to call, and SUBMIT(answer=...) ends it.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def write_trajectories(run: str, directory: Path) -> int:
    """Write a file for each recursive query of an execution, such as `trajectory-3-1.json`. Return their number."""
    directory.mkdir(parents=True, exist_ok=True)
    count = 0
    for outcome in load_report(run).outcomes:
        records = [record for record in outcome.meta.queries.tree if record["kind"] == "rlm_query"]
        for number, record in enumerate(records, 1):
            name = f"trajectory-{outcome.meta.index}-{number}"
            text = json.dumps(build_trajectory(record, name), ensure_ascii=False, indent=2)
            # Half a surrogate pair cannot be encoded as UTF-8.
            (directory / f"{name}.json").write_bytes(text.encode("utf-8", "replace"))
        count += len(records)
    return count


def build_trajectory(record: Json, trajectory_id: str) -> Json:
    """Return the trajectory of a recursive query's record, with those of the queries that its code asked."""
    steps: list[Json] = [{"source": "user", "message": record["prompt"]}]
    subagents: list[Json] = []
    queries = record.get("queries", [])
    for number, turn in enumerate(record.get("trajectory", []), 1):
        asked = [query for query in queries if query["turn"] == number]
        flat = [query for query in asked if query["kind"] == "llm_query"]
        below = [
            build_trajectory(query, f"{trajectory_id}.{len(subagents) + place}")
            for place, query in enumerate([query for query in asked if query["kind"] == "rlm_query"], 1)
        ]
        subagents += below
        steps.append(build_step(turn, number, flat, [item["trajectory_id"] for item in below]))
    if record.get("error"):
        steps.append({"source": "system", "message": f"There was no answer: {record['error']}"})
    return drop_none(
        schema_version="ATIF-v1.7",  # the first version with trajectories inside others
        trajectory_id=trajectory_id,
        agent={
            "name": "rlm-batch",
            "version": version("rlm-batch"),
            "model_name": record["model"],
            "tool_definitions": [TOOL],
        },
        steps=[{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        final_metrics=drop_none(
            total_prompt_tokens=record["prompt_tokens"],
            total_completion_tokens=record["completion_tokens"],
            total_cost_usd=record["cost"],
            total_steps=len(steps),
        ),
        subagent_trajectories=subagents or None,
    )


def build_step(turn: Json, number: int, flat: list[Json], below: list[str]) -> Json:
    """Return a turn's step. `flat` has the flat queries of its code, `below` the ids of trajectories inside."""
    usage = turn.get("usage")
    metrics = usage and drop_none(
        prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"], cost_usd=usage["cost"]
    )
    observation = drop_none(
        source_call_id=f"call_{number}",
        content=turn.get("output") or "",
        subagent_trajectory_ref=[{"trajectory_id": item} for item in below] or None,
        extra={"llm_queries": flat} if flat else None,
    )
    call = {"tool_call_id": f"call_{number}", "function_name": "python", "arguments": {"code": turn.get("code") or ""}}
    return drop_none(
        source="agent",
        message="",
        reasoning_content="\n\n".join(filter(None, (turn.get("thoughts"), turn.get("reasoning")))) or None,
        tool_calls=[call],
        observation={"results": [observation]},
        metrics=metrics,
    )


def drop_none(**fields: Any) -> Json:
    """Return the fields that are not None: the format has no null."""
    return {name: value for name, value in fields.items() if value is not None}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"{write_trajectories(sys.argv[1], Path(sys.argv[2]))} trajectories in {sys.argv[2]}")
