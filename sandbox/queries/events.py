"""Events of recursive queries, for those who watch a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

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
