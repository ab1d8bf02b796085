"""The conversations with language models in a ledger, as JSON lines of chat messages for training.

Only runs with `record="full"` have them. A recursive model's turns are one conversation, and each query of its code is
another one. If a model's history was replaced, for example by a summary, each history is a separate conversation.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_to_json
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.model_ledgers import TranscriptReader
from .ledger_reader import LedgerReader

MAX_VARIABLE_CHARACTERS = 1_000  # Longer JSON of a variable, such as a context, is omitted.
Json = dict[str, Any]


def write_conversations(reader: LedgerReader, file: Path) -> None:
    """Write a line for each conversation. Only the conversations of one execution are in memory at a time.

    Raises:
        ConfigurationError: The run has no conversations.
        OSError: The file cannot be written.
    """
    transcripts = TranscriptReader(reader.ledger.path)
    is_empty = True
    with file.open("wb") as target:
        for outcome in reader.read_outcomes(with_reduction=True):
            described = _describe_outcome(outcome)
            for conversation in build_conversations(transcripts.read_requests(outcome.meta.queries.tree)):
                text = json.dumps({**conversation, **described}, ensure_ascii=False)
                # Half a surrogate pair cannot be encoded as UTF-8.
                target.write(text.encode("utf-8", "replace") + b"\n")
                is_empty = False
    if is_empty:
        raise ConfigurationError(
            f"{reader.ledger.path} has no conversations: only runs with record='full' (--record full) that ask a "
            "language model have them"
        )


def build_conversations(lines: Iterable[Json]) -> Iterator[Json]:
    """Yield the conversations in the order of their first requests. A conversation ends with an answer."""
    by_query: dict[str, list[Json]] = {}  # the parts of each query's conversation
    for line in lines:
        _add_request(by_query.setdefault(line["query"], []), line)
    for parts in by_query.values():
        answered = [part for part in parts if part["end"]]
        for number, part in enumerate(answered, 1):
            conversation: Json = {"messages": part["messages"][: part["end"]]}
            if any(item is not None for item in part["logprobs"]):
                conversation["logprobs"] = part["logprobs"]
            conversation |= part["query"]
            if len(answered) > 1:
                conversation["part"] = number
            yield {**conversation, "usage": part["usage"]}


def _add_request(parts: list[Json], line: Json) -> None:
    """Add a request to the last part of its query's conversation.

    A request keeps the first messages of the request before. If it does not keep all of them, a new part begins.
    """
    earlier: list[Json] = parts[-1]["messages"] if parts else []
    kept_count = min(line["kept"], len(earlier))
    if not parts or kept_count < len(earlier):
        names = ("query", "parent", "kind", "depth", "model", "options")
        parts.append(
            {
                "messages": earlier[:kept_count],
                "end": 0,  # number of messages up to the last answer
                "logprobs": [],  # one item for each answer of this part
                "query": {name: line[name] for name in names if line.get(name)},
                "usage": {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost": 0.0},
            }
        )
    part = parts[-1]
    part["messages"] += line["messages"]
    if "answer" not in line:
        return
    answer = {"role": "assistant", "content": line["answer"]}
    if "reasoning_content" in line:
        answer["reasoning_content"] = line["reasoning_content"]
    part["messages"].append(answer)
    part["end"] = len(part["messages"])
    part["logprobs"].append(line.get("logprobs"))
    for name, value in part["usage"].items():
        added = line["usage"][name]
        part["usage"][name] = None if value is None or added is None else value + added  # A cost may be unknown.


def _describe_outcome(outcome: Outcome) -> Json:
    """Return what identifies and scores an execution: number, status, fields or error, check, and short variables."""
    data = outcome_to_json(outcome)
    status = "succeeded" if isinstance(outcome, Result) else "failed"
    described: Json = {"execution": outcome.meta.index, "status": status}
    for name in ("outputs", "nonfinite"):
        if name in data:
            described[name] = data[name]
    if "error" in data:
        described["error"] = f"{data['error']['error']}: {data['error']['text']}"
    if outcome.meta.judged is not None:
        described["judged"] = outcome.meta.judged
    described["variables"] = {
        name: value
        for name, value in data["meta"]["variables"].items()
        if len(json.dumps(value)) <= MAX_VARIABLE_CHARACTERS
    }
    return described
