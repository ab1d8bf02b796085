"""The conversations with language models in a ledger, as JSON lines of chat messages for training.

Only runs with `record="full"` have them. A recursive model's turns are one conversation, and each query of its code is
another one. If a model's history was replaced, for example by a summary, each history is a separate conversation.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_to_json
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.model_ledgers import TranscriptReader, get_session
from .ledger_reader import LedgerReader

MAX_VARIABLE_CHARACTERS = 1_000  # Longer JSON of a variable, such as a context, is omitted.
COUNTS = ("calls", "prompt_tokens", "completion_tokens")
Json = dict[str, Any]


def write_conversations(reader: LedgerReader, file: Path) -> None:
    """Write a line for each conversation. Only the conversations of one execution are in memory at a time.

    Raises OSError, and ConfigurationError if the run has no conversations.
    """
    transcripts, is_empty = TranscriptReader(reader.ledger.path), True
    with file.open("wb") as target:
        for outcome in reader.read_outcomes():
            described = _describe_outcome(outcome)
            sessions = {get_session(record["id"]) for record in outcome.meta.queries.tree if "id" in record}
            lines = itertools.chain.from_iterable(map(transcripts.read_session, sorted(sessions)))
            for conversation in build_conversations(lines):
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
    by_query: dict[str, list[Json]] = {}
    for line in lines:
        if line["status"] == "request":
            _add_request(by_query.setdefault(line["query"], []), line)
    for parts in by_query.values():
        answered = [part for part in parts if part["answers"]]
        for number, part in enumerate(answered, 1):
            messages, logprobs = part["messages"][: part["answers"]], part["logprobs"]
            yield {
                "messages": messages,
                **({"logprobs": logprobs} if any(item is not None for item in logprobs) else {}),
                **part["query"],
                **({"part": number} if len(answered) > 1 else {}),
                "usage": part["usage"],
            }


def _add_request(parts: list[Json], line: Json) -> None:
    """Add a request to the last part of its query's conversation, or begin a part if it has other messages."""
    before: list[Json] = parts[-1]["messages"] if parts else []
    kept = min(line["kept"], len(before))
    if not parts or kept < len(before):
        names = ("query", "parent", "kind", "depth", "model", "options")
        parts.append(
            {
                "messages": before[:kept],
                "answers": 0,  # number of messages up to the last answer
                "logprobs": [],  # one item for each answer of this part
                "query": {name: line[name] for name in names if line.get(name)},
                "usage": {**dict.fromkeys(COUNTS, 0), "cost": 0.0},
            }
        )
    part = parts[-1]
    part["messages"] += line["messages"]
    if "answer" not in line:
        return
    part["messages"].append({"role": "assistant", "content": line["answer"]})
    if "reasoning_content" in line:
        part["messages"][-1]["reasoning_content"] = line["reasoning_content"]
    part["answers"] = len(part["messages"])
    part["logprobs"].append(line.get("logprobs"))
    usage, cost = part["usage"], line["usage"]["cost"]
    for name in COUNTS:
        usage[name] += line["usage"][name]
    usage["cost"] = None if cost is None or usage["cost"] is None else usage["cost"] + cost


def _describe_outcome(outcome: Outcome) -> Json:
    """Return what identifies and scores an execution: number, status, fields or error, check, and short variables."""
    data, meta = outcome_to_json(outcome), outcome.meta
    described: Json = {"execution": meta.index, "status": "succeeded" if isinstance(outcome, Result) else "failed"}
    described |= {name: data[name] for name in ("outputs", "nonfinite") if name in data}
    if "error" in data:
        described["error"] = f"{data['error']['error']}: {data['error']['text']}"
    if meta.judged is not None:
        described["judged"] = meta.judged
    variables: Json = data["meta"]["variables"]
    described["variables"] = {
        name: value for name, value in variables.items() if len(json.dumps(value)) <= MAX_VARIABLE_CHARACTERS
    }
    return described
