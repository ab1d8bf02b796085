"""Trajectories of recursive queries, in the Agent Trajectory Interchange Format (Harbor's RFC 0001).

A turn of the model is a step: its reasoning, its code as a call of the tool `python`, and the output as the
observation. Recursive queries that the code asked are trajectories inside it. Flat queries are part of the observation.
With `record="full"`, a trajectory has the instructions, whole outputs and flat queries, and log probabilities.
"""

import json
import math
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...blocks.storage.location import replace_atomically
from ...sandbox.errors import ConfigurationError
from ...sandbox.queries.session import RECORDED_CHARACTERS
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.transcript_ledger import TranscriptReader
from .conversations import read_requests
from .ledger_reader import LedgerReader

SCHEMA_VERSION = "ATIF-v1.7"  # the first version with trajectories inside others
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python in a sandbox. Names persist from call to call, and SUBMIT(answer=...) ends it.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
COUNTS = ("calls", "prompt_tokens", "completion_tokens")  # fields of a record, and of a turn's usage
FLAT_FIELDS = ("model", "prompt", "seconds", *COUNTS, "cost", "error")  # exported fields of a flat query

Json = dict[str, Any]
Requests = dict[str, list[Json]]  # the lines of a transcript by the ids of queries


def check_directory(path: Path) -> None:
    """Raise ConfigurationError unless the path is an empty directory, or can be created as one."""
    remedy = "name a new directory, or an empty one"
    try:
        if path.is_dir():
            if any(path.iterdir()):
                raise ConfigurationError(f"{path} is not empty: {remedy}")
            return
        nearest = next(above for above in (path, *path.parents) if above.is_symlink() or above.exists())
        if not nearest.is_dir():
            raise ConfigurationError(f"{nearest} is not a directory: {remedy}")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from None


def write_trajectories(reader: LedgerReader, directory: Path) -> None:
    """Write a file for each recursive query of an execution. Only one execution is in memory at a time.

    The file of execution 3 is `trajectory-3.json`. If its code asked several recursive queries, the file of the first
    is `trajectory-3-1.json`. Raises OSError, and ConfigurationError if the run has no trajectories.
    """
    session_id = reader.records[-1].flow_run_id or None
    transcripts, is_empty = TranscriptReader(reader.ledger.path), True
    for outcome in reader.read_outcomes():
        requests = _group_requests(read_requests(transcripts, outcome))
        for name, document in _build_documents(outcome, session_id, requests):
            directory.mkdir(parents=True, exist_ok=True)
            # Half a surrogate pair cannot be encoded as UTF-8.
            text = json.dumps(document, ensure_ascii=False, indent=2).encode("utf-8", "replace")
            with replace_atomically(directory / name) as partial:
                partial.write_bytes(text)
            is_empty = False
    if is_empty:
        raise ConfigurationError(
            f"{reader.ledger.path} has no trajectories: only runs that use rlm or rlm_query have them"
        )


def _group_requests(lines: Iterable[Json]) -> Requests:
    requests: Requests = {}
    for line in lines:
        requests.setdefault(line["query"], []).append(line)
    return requests


def _build_documents(outcome: Outcome, session_id: str | None, requests: Requests) -> Iterator[tuple[str, Json]]:
    """Yield the file name and the trajectory of each recursive query of an execution."""
    records = [record for record in outcome.meta.queries.tree if record["kind"] == "rlm_query"]
    question = outcome.meta.variables.get("query")
    answer = outcome.outputs.get("answer") if isinstance(outcome, Result) and len(records) == 1 else None
    for number, record in enumerate(records, 1):
        name = f"{outcome.meta.index}" if len(records) == 1 else f"{outcome.meta.index}-{number}"
        # The flow rlm passes its variable `query` on unchanged. A record has only the beginning of a long question.
        is_whole = isinstance(question, str) and question[:RECORDED_CHARACTERS] == record["prompt"]
        yield (
            f"trajectory-{name}.json",
            _build_trajectory(
                record,
                f"{session_id or 'run'}-{name}",
                requests,
                session_id,
                question=question if is_whole else None,
                answer=answer if isinstance(answer, str) else "",
            ),
        )


def _build_trajectory(
    record: Json,
    trajectory_id: str,
    requests: Requests,
    session_id: str | None = None,
    *,
    question: str | None = None,
    answer: str = "",
) -> Json:
    """Return the trajectory of a recursive query's record. `requests` has the lines of the execution's transcript.

    `question` is the whole question, if it is known: the record has only its beginning. `answer` is the model's answer,
    if it is known.
    """
    turns, queries = record.get("trajectory", []), record.get("queries", [])
    subagents: list[Json] = []
    ids: dict[int, str] = {}  # trajectory ids of the recursive queries below, by the identity of their records
    queries_by_turn: dict[int, list[Json]] = {}
    for query in queries:
        queries_by_turn.setdefault(min(query["turn"], len(turns)), []).append(query)
        if query["kind"] == "rlm_query":
            ids[id(query)] = f"{trajectory_id}.{len(subagents) + 1}"
            subagents.append(_build_trajectory(query, ids[id(query)], requests))
    own = requests.get(record.get("id", ""), [])
    first = next((line["messages"] for line in own if line["status"] == "request"), None)
    if first is not None:  # The prompt is whole, with the instructions.
        question = None
        steps: list[Json] = [
            {"source": "user" if message.get("role") == "user" else "system", "message": _read_text(message)}
            for message in first
        ]
    else:
        steps = [{"source": "user", "message": record["prompt"] if question is None else question}]
    for number, turn in enumerate(turns, 1):
        asked = [_describe_flat(query, requests) for query in queries_by_turn.get(number, []) if id(query) not in ids]
        below = [ids[id(query)] for query in queries_by_turn.get(number, []) if id(query) in ids]
        steps.append(_build_step(turn, number, asked, below, [line for line in own if line["turn"] == number]))
    rest = _subtract_turns(record, turns)
    if record.get("error"):
        steps.append({"source": "system", "message": f"There was no answer: {record['error']}"})
    elif rest is not None and rest["calls"]:  # After its last turn, the model was asked for a final answer.
        steps.append({"source": "agent", "message": answer, **_build_metrics(rest)})
    is_cut = question is None and first is None and len(record["prompt"]) == RECORDED_CHARACTERS
    note = f"The question is cut after {RECORDED_CHARACTERS:,} characters, as in the ledger." if is_cut else None
    return _drop_none(
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


def _describe_flat(query: Json, requests: Requests) -> Json:
    """Return a flat query's fields, with the whole messages and the answer if the transcript has them."""
    described = {name: query[name] for name in FLAT_FIELDS if name in query}
    for line in requests.get(query.get("id", ""), []):
        described |= {name: line[name] for name in ("messages", "options", "answer", "logprobs") if line.get(name)}
    return described


def _read_text(message: Json) -> str:
    content: Any = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _build_step(turn: Json, number: int, flat: list[Json], below: list[str], lines: list[Json]) -> Json:
    """Return a turn's step.

    Args:
        turn: The turn.
        number: Its number, from 1.
        flat: The flat queries of its code.
        below: The ids of the trajectories of its code's recursive queries.
        lines: The turn's lines of the transcript.
    """
    call_id = f"call_{number}"
    output = next((line["output"] for line in lines if line["status"] == "output"), turn.get("output") or "")
    extra = {**({"llm_queries": flat} if flat else {}), **({"failed": True} if turn.get("failed") else {})}
    references = [{"trajectory_id": trajectory_id} for trajectory_id in below]
    observation = _drop_none(
        source_call_id=call_id,
        content=output,
        subagent_trajectory_ref=references or None,
        extra=extra or None,
    )
    usage = turn.get("usage")
    metrics = _build_metrics(usage) if usage and usage["calls"] else {}
    tokens = next((line["logprobs"] for line in reversed(lines) if line.get("logprobs")), None)
    if metrics and tokens is not None:
        metrics["metrics"]["logprobs"] = [token["logprob"] for token in tokens]
    return _drop_none(
        source="agent",
        message="",
        reasoning_content=turn.get("reasoning") or None,
        tool_calls=[
            {"tool_call_id": call_id, "function_name": "python", "arguments": {"code": turn.get("code") or ""}}
        ],
        observation={"results": [observation]},
        **metrics,
    )


def _build_metrics(usage: Json) -> Json:
    """Return a step's metrics, and the number of the model's calls."""
    metrics = _drop_none(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cost_usd=_read_cost(usage),
    )
    return {"metrics": metrics, "llm_call_count": usage["calls"]}


def _build_final_metrics(record: Json, step_count: int) -> Json:
    """Return the totals. In this format, tokens are of the trajectory's own steps, but costs include nested queries."""
    below = list(_list_queries(record.get("queries", [])))
    costs = _read_costs([record, *below])
    extra: Json = {"llm_calls": record["calls"], "seconds": record["seconds"]}
    if below:
        extra["queries"] = {"count": len(below), **{name: sum(query[name] for query in below) for name in COUNTS}}
    return _drop_none(
        total_prompt_tokens=record["prompt_tokens"],
        total_completion_tokens=record["completion_tokens"],
        total_cost_usd=None if costs is None else sum(costs),
        total_steps=step_count,
        extra=extra,
    )


def _list_queries(records: Iterable[Json]) -> Iterable[Json]:
    for record in records:
        yield record
        yield from _list_queries(record.get("queries", []))


def _subtract_turns(record: Json, turns: list[Json]) -> Json | None:
    """Return the query's usage outside its turns, or None if the usage of a turn is unknown."""
    if not all("usage" in turn for turn in turns):
        return None
    usages: list[Json] = [turn["usage"] for turn in turns]
    rest: Json = {name: max(0, record[name] - sum(usage[name] for usage in usages)) for name in COUNTS}
    costs = _read_costs([record, *usages])
    rest["cost"] = None if costs is None else max(0.0, costs[0] - sum(costs[1:]))
    return rest


def _read_costs(usages: Iterable[Json]) -> list[float] | None:
    """Return all costs in US dollars, or None if one is unknown."""
    costs = [_read_cost(usage) for usage in usages]
    return [cost for cost in costs if cost is not None] if None not in costs else None


def _read_cost(usage: Json) -> float | None:
    """Return the cost in US dollars, or None if it is unknown or not finite."""
    cost = usage["cost"]
    return float(cost) if cost is not None and math.isfinite(cost) else None


def _drop_none(**fields: Any) -> Json:
    """Return the fields that are not None: the format has no null."""
    return {name: value for name, value in fields.items() if value is not None}
