"""Requests to models, and the records of queries: the query itself, its events, and its transcript."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from ..result import Failure, Outcome
from ..wire.nonfinite import replace_nonfinite, restore_numbers
from .answer_type import AnswerType
from .budget import Estimate, LastTurn, Usage

SHORT_CHARACTERS = 10_000  # characters to which `shorten` cuts a text by default
# Role and content, as in OpenAI's chat API. The content is a text, or a list of parts with texts and images.
Message = dict[str, Any]


@dataclass(slots=True)
class ConversationState:
    """The messages of a conversation, with which another process can continue it."""

    history: list[Message] = field(default_factory=list[Message])  # all messages but the instructions
    outcome: str = ""  # the outcome of the last question, with which the next one begins
    # After a summary, the prompt has the question at this position of the history, and the messages from `start` on.
    question: int = 0
    start: int = 0  # 0 without a summary

    def list_prompt(self) -> list[Message]:
        """Return the messages of the next prompt after the instructions."""
        return [self.history[self.question], *self.history[self.start :]] if self.start else self.history

    def list_replaced(self) -> list[Message] | None:
        """Return all messages before the last summary, or None without a summary."""
        return self.history[: self.start] if self.start else None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request, which win over the model's own settings. None leaves these unchanged."""

    temperature: float | None = None
    max_tokens: int | None = None  # The model's own limit also holds.
    response_format: dict[str, Any] | None = None  # JSON schema of the answer, whose outermost type is "object"

    def list_changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults."""
        return {name: value for name, value in asdict(self).items() if value is not None}


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer and its usage."""

    text: str  # `QuerySession.ask` moves the thoughts in it to `thoughts`.
    usage: Usage
    logprobs: list[dict[str, Any]] | None = None  # a dict for each token in OpenAI's form, if they were requested
    finish_reason: str = "stop"
    thoughts: str = ""  # the model's reasoning, which is neither code nor answer


class Model(Protocol):
    """A language model. Records show its `name`."""

    name: str

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        """Return the model's answer. Raises QueryError, and EmptyAnswerError if the answer is empty or incomplete."""
        ...

    async def estimate_max_usage(
        self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS, *, is_priced: bool = True
    ) -> Estimate:
        """Return the most that a call can use. Without `is_priced`, prices are 0.

        Raises ConfigurationError if a price or the length of the longest answer is unknown.
        """
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return, as JSON and without secrets, the settings that change answers: model, address and sampling."""
        ...


@dataclass(slots=True)
class Query:
    """The record of one query. `usage` and `cached` exclude the queries below it."""

    kind: str
    depth: int
    model: str
    prompt: str
    turn: int = 0  # number of the turn whose code asked, from 1; 0 if plain code asked
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    cached: int = 0  # number of questions that were answered without a call
    error: str = ""
    answer: str = ""  # the answer as text, shortened
    value: Any = ""  # a recursive model's answer; `to_json` leaves it out if it is a text
    trajectory: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    children: list[Query] = field(default_factory=list["Query"])
    is_plain: bool = False  # A model answered a recursive query without Python, because of its depth.
    query_count: int = 0  # number of the ended queries below it
    query_usage: Usage = field(default_factory=Usage)  # usage of the ended queries below it
    id: str = ""  # set if the session has a transcript
    parent_id: str = ""
    last_turn: LastTurn | None = None  # that of the recursive model, while it answers the query
    sent: list[Message] = field(default_factory=list[Message])  # the last request's messages and its answer

    @property
    def usage_text(self) -> str:
        """Return the model and its usage as a line of text: calls, tokens and cost."""
        return f"{self.model}: {self.usage.describe(self.cached) or 'no answer'}"

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON, with the records of the queries below it."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "depth": self.depth,
            "model": self.model,
            "prompt": self.prompt,
            "seconds": round(self.seconds, 6),
            **asdict(self.usage),
        }
        optional = {
            "id": self.id,
            "turn": self.turn,
            "cached": self.cached,
            "plain": self.is_plain,
            "error": self.error,
            "answer": self.answer,
        }
        record |= {name: value for name, value in optional.items() if value}
        if not isinstance(self.value, str):
            finite, nonfinite = replace_nonfinite({"value": self.value})
            record |= finite
            if nonfinite:
                record["nonfinite"] = nonfinite
        if self.trajectory:
            record["trajectory"] = self.trajectory
        if self.children:
            record["queries"] = [child.to_json() for child in self.children]
        return record


EventKind = Literal["turn", "code", "output", "query", "answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RlmEvent:
    """An event of a recursive query.

    Attributes:
        kind: "turn" when a turn begins, "code" when the model has replied, "output" when the turn has ended, "query"
            when a query of the code has ended, and "answer" when a question of the run has ended.
        query: Record of the query so far: of the recursive query that has the turn, or of the query that has ended.
        index: Number of the execution in its run, from 0.
        turn: Number of the turn, from 1. For a query, the number of the turn that asked it.
        text: The code, the output, the answer, or the first 200 characters of a query's answer.
        reasoning: Text of the model's reply outside its code, for "code" and "output".
        code: Code of the reply, for "code" and "output".
        output: Text that the model sees after the turn, for "output".
        failed: True if the turn's code failed, or if the query has no answer.
        error: Type and text of the error, if the query has no answer.
        queries: Number of the queries that ended in the turn, for "output".
        usage: Calls, tokens and cost, including queries below.
        seconds: Seconds of the turn or the query.
    """

    kind: EventKind
    query: Query
    index: int = 0
    turn: int = 0
    text: str = ""
    reasoning: str = ""
    code: str = ""
    output: str = ""
    failed: bool = False
    error: str = ""
    queries: int = 0
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """The depth of the event's query. A question of the run has depth 1."""
        return self.query.depth


OnEvent = Callable[[RlmEvent], object]


class Transcript:
    """A transcript of a session: it passes each request and each long output to `save`, as JSON.

    A saved request has only its new messages. `kept` is the number of earlier messages, which the query's last request
    and its answer have. So a transcript grows with the length of a conversation, and not with its square.
    """

    def __init__(self, save: Callable[[dict[str, Any]], object]) -> None:
        self._save = save
        self._id = uuid.uuid4().hex[:12]
        self._count = 0

    def name_query(self, query: Query, parent: Query | None) -> None:
        """Set the query's id and the id of its parent. All ids of a session have the same text before the hyphen."""
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
        kept = _count_equal(query.sent, messages)
        line: dict[str, Any] = {
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
        answer = getattr(outcome, "answer", outcome)  # EmptyAnswerError has an answer.
        thoughts = getattr(answer, "thoughts", "")
        if thoughts:
            line["reasoning_content"] = thoughts
        self._save(line)

    def add_output(self, query: Query, output: str) -> None:
        """Save the whole output of the query's last turn."""
        self._save({**self._describe(query, "output"), "output": output})

    @staticmethod
    def _describe(query: Query, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "query": query.id,
            "parent": query.parent_id,
            "kind": query.kind,
            "depth": query.depth,
            "turn": len(query.trajectory),
            "asked_in": query.turn,
        }


def _count_equal(old: list[Message], new: list[Message]) -> int:
    """Return the number of equal messages at the beginning of two conversations."""
    count = 0
    for old_message, new_message in zip(old, new, strict=False):
        if old_message != new_message:
            break
        count += 1
    return count


def shorten(text: str, limit: int = SHORT_CHARACTERS) -> str:
    """Return the text, or its beginning and its end if it has more characters than the limit."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[len(text) - half :]}"


def read_answer(outcome: Outcome, answer_type: AnswerType | None) -> tuple[str, Any, list[dict[str, Any]]]:
    """Return the text, the value and the turns of a question's answer. With a type, the value has this type.

    Without an answer, the text is the output of the last turn that printed something and did not fail.
    """
    tree = outcome.meta.queries.tree
    record = tree[0] if tree else {}
    turns: list[dict[str, Any]] = record.get("trajectory", [])
    if isinstance(outcome, Failure):
        outputs = [turn["output"] for turn in turns if turn.get("output") and not turn.get("failed")]
        return outputs[-1] if outputs else "", None, turns
    text = outcome["answer"]
    recorded = {"value": deepcopy(record.get("value", text))}
    restore_numbers(recorded, record.get("nonfinite", {}))  # NaN and infinities
    value = recorded["value"] if answer_type is None else answer_type.restore(recorded["value"])
    return text, value, turns
