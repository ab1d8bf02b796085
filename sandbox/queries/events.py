"""Events of recursive queries, for those who watch a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .budget import Usage

if TYPE_CHECKING:
    from .session import Query

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


class TurnWatch:
    """A turn in progress: it emits the events of the turn, and notes its seconds in the trajectory.

    Args:
        query: Record of the recursive query. The turn is the last of its trajectory.
        emit: Takes each event.
    """

    def __init__(self, query: Query, emit: OnEvent) -> None:
        self._query, self._emit = query, emit
        self._number = len(query.trajectory)
        self._turn = query.trajectory[-1]
        self._started_at = time.monotonic()
        self._queries_before, self._usage_before = query.query_count, query.query_usage
        emit(RlmEvent(kind="turn", query=query, turn=self._number))

    def emit_code(self) -> None:
        """Emit the event of the model's reply, whose reasoning and code the turn has."""
        self._emit_turn("code", text=self._turn["code"])

    def emit_end(self) -> None:
        """Emit the event of the turn's end."""
        turn, query = self._turn, self._query
        turn["seconds"] = round(time.monotonic() - self._started_at, 3)
        self._emit_turn(
            "output",
            text=turn["output"],
            output=turn["output"],
            failed=bool(turn.get("failed")),
            queries=query.query_count - self._queries_before,
            usage=Usage(**turn["usage"]) + (query.query_usage - self._usage_before),
            seconds=turn["seconds"],
        )

    def _emit_turn(self, kind: EventKind, **fields: Any) -> None:
        code, reasoning = self._turn["code"], self._turn["reasoning"]
        query, number = self._query, self._number
        self._emit(RlmEvent(kind=kind, query=query, turn=number, reasoning=reasoning, code=code, **fields))
