"""The transcript of a session: its whole requests and answers, for training and inspection."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Answer, Message, Model, Query, RequestOptions

Json = dict[str, Any]


class Transcript:
    """A transcript: passes each request of a session, and each long output, to `save` as JSON. It keeps none of them.

    A request has only the messages that the query's last request and its answer did not have: `kept` is the number of
    the others. So the size of a conversation's transcript grows with its length, and not with its square.
    """

    def __init__(self, save: Callable[[Json], object]) -> None:
        self._save = save
        self._id = uuid.uuid4().hex[:12]
        self._count = 0

    def name_query(self, query: Query, parent: Query | None) -> None:
        """Set the query's id and the id of its parent. All ids of one session begin alike, up to a hyphen."""
        self._count += 1
        query.id = f"{self._id}-{self._count}"
        query.parent_id = "" if parent is None else parent.id

    def add_request(
        self,
        model: Model,
        messages: list[Message],
        options: RequestOptions,
        query: Query,
        outcome: Answer | Exception,
        seconds: float,
    ) -> None:
        """Save one request of the query, with its answer or its error."""
        pairs = enumerate(zip(query.sent, messages, strict=False))
        kept = next((number for number, (old, new) in pairs if old != new), min(len(query.sent), len(messages)))
        line: Json = {
            **self._describe(query, "request"),
            "model": model.name,
            "kept": kept,
            "messages": messages[kept:],
            "options": {**model.fingerprint().get("sampling", {}), **options.list_changed()},
            "seconds": round(seconds, 3),
        }
        query.sent = list(messages)
        if isinstance(outcome, Exception):
            line["error"] = f"{type(outcome).__name__}: {outcome}"
        else:
            query.sent.append({"role": "assistant", "content": outcome.text})
            line |= {"answer": outcome.text, "usage": asdict(outcome.usage)}
            if not outcome.usage.calls:
                line["cached"] = True
            if outcome.logprobs is not None:
                line["logprobs"] = outcome.logprobs
        answer = getattr(outcome, "answer", outcome)  # EmptyAnswerError has one.
        if thoughts := getattr(answer, "thoughts", ""):
            line["reasoning_content"] = thoughts
        self._save(line)

    def add_output(self, query: Query, output: str) -> None:
        """Save the whole output of the query's last turn."""
        self._save({**self._describe(query, "output"), "output": output})

    @staticmethod
    def _describe(query: Query, status: str) -> Json:
        return {
            "status": status,
            "query": query.id,
            "parent": query.parent_id,
            "kind": query.kind,
            "depth": query.depth,
            "turn": len(query.trajectory),
        }
