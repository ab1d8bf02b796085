"""Queries of one top-level execution: what its code may ask, within which limits, and the record of it.

One `QuerySession` stands for a top-level execution and all that is asked below it: one budget, one deadline, and one
limit on what is asked of the model at once. That limit is held by requests to the model alone, never by a query that
waits for others, so that no depth of recursion can deadlock it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ..errors import DeadlineExceeded, QueryError, RlmBatchError
from ..meta import QuerySummary
from .budget import Budget, Usage

Message = dict[str, str]  # role and content, as in OpenAI's chat API
RECORDED_CHARACTERS = 200  # of a prompt and of an error that stand in a record
MAX_RECORDED_QUERIES = 1000  # of a session; the rest are counted
DEADLINE_MARGIN_SECONDS = 1.0  # or a twentieth of a shorter timeout: in them code can submit what it has


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered, and what that took."""

    text: str
    usage: Usage


class NoAnswerError(Exception):
    """A request that was taken and counted, and has no answer: `usage` is what it took nonetheless.

    Between a model and the session that asks it; code gets a QueryError.
    """

    def __init__(self, message: str, usage: Usage) -> None:
        super().__init__(message)
        self.usage = usage


class Model(Protocol):
    """A language model. `name` is its own, and stands in records."""

    name: str

    async def ask(self, messages: list[Message]) -> Answer:
        """The model's answer. Raises QueryError, and NoAnswerError where there is none and tokens were used."""
        ...

    async def estimate_max_usage(self, messages: list[Message]) -> tuple[int, float]:
        """The most tokens, and the most US dollars, that an answer can take. Raises ConfigurationError."""
        ...


@dataclass(slots=True)
class Query:
    """One query as it is recorded. `usage` is its own calls', not those of the queries below it.

    `turn` is the number, from 1, of the turn of a recursive query whose code has asked it; 0 where plain code has.
    """

    kind: str
    depth: int
    model: str
    prompt: str
    turn: int = 0
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    error: str = ""
    trajectory: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    children: list["Query"] = field(default_factory=list["Query"])

    def __str__(self) -> str:
        return f"{self.kind} at depth {self.depth}, {self.model}"

    @property
    def usage_text(self) -> str:
        """Its tokens and cost, for a person."""
        usage = self.usage
        price = "cost unknown" if usage.cost is None else f"${usage.cost:.6f}"
        return f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens, {price}"

    def to_json(self) -> dict[str, Any]:
        """The record, with those of the queries below it."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "depth": self.depth,
            "model": self.model,
            "prompt": self.prompt,
            "seconds": round(self.seconds, 6),
            **asdict(self.usage),
        }
        if self.turn:
            record["turn"] = self.turn
        if self.error:
            record["error"] = self.error
        if self.trajectory:
            record["trajectory"] = self.trajectory
        if self.children:
            record["queries"] = [child.to_json() for child in self.children]
        return record


# Does a query's work and tells somebody of it.
RunTracked = Callable[[Query, Callable[[], Awaitable[str]]], Awaitable[str]]


async def run_untracked(_query: Query, work: Callable[[], Awaitable[str]]) -> str:
    """Does a query's work without telling anybody."""
    return await work()


@dataclass(kw_only=True, eq=False)
class QuerySession:
    """What a top-level execution and all queries below it share.

    `flat_model` answers `llm_query`, and `root_model` takes a recursive model's own turns. `concurrency` is how many
    requests may be under way at once. `track` is told of each query. `deadline` is by the event loop's clock, None for
    none; the execution sets it when its code is sent.
    """

    root_model: Model
    flat_model: Model
    budget: Budget
    concurrency: int
    track: RunTracked = run_untracked
    deadline: float | None = None
    queries: list[Query] = field(default_factory=list[Query])

    def __post_init__(self) -> None:
        self._request_slots = asyncio.Semaphore(self.concurrency)
        self._asked = self._failed = self._recorded = 0

    def set_deadline(self, timeout: float | None) -> None:
        """Sets the deadline of all queries by the timeout of the code that asks, in seconds."""
        if timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + timeout - min(DEADLINE_MARGIN_SECONDS, timeout / 20)

    def check_seconds_left(self) -> float | None:
        """The seconds until the deadline; None where there is none. Raises DeadlineExceeded."""
        if self.deadline is None:
            return None
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise self.make_deadline_error()
        return seconds

    @staticmethod
    def make_deadline_error() -> DeadlineExceeded:
        return DeadlineExceeded("the time for queries is over: give the execution a longer timeout, or ask for less")

    async def ask(self, model: Model, messages: list[Message], query: Query) -> Answer:
        """One request to a model. Raises BudgetExceeded, DeadlineExceeded and QueryError."""
        self.check_seconds_left()
        max_usage = await model.estimate_max_usage(messages) if self.budget.needs_estimates else (0, 0.0)
        try:
            async with asyncio.timeout_at(self.deadline), self._request_slots:
                # Not before: what waits for its turn shall not hold what others could use, or give back.
                reservation = self.budget.reserve(*max_usage)
                try:
                    try:
                        answer = await model.ask(messages)
                    except NoAnswerError as error:
                        reservation.settle(error.usage)
                        query.usage += error.usage
                        raise QueryError(str(error)) from None
                    reservation.settle(answer.usage)
                finally:
                    reservation.release()  # of what was not settled; nobody says whether a cancelled request was billed
        except TimeoutError:
            raise self.make_deadline_error() from None
        query.usage += answer.usage
        return answer

    async def run_recorded(self, query: Query, parent: Query | None, work: Callable[[], Awaitable[str]]) -> str:
        """Does a query's work, and records it."""
        self._asked += 1
        if self._recorded < MAX_RECORDED_QUERIES:
            self._recorded += 1
            (self.queries if parent is None else parent.children).append(query)
        try:
            return await self.track(query, work)
        except BaseException as error:
            self._failed += 1
            text = error.summary if isinstance(error, RlmBatchError) else str(error)
            query.error = f"{type(error).__name__}: {text}"[:RECORDED_CHARACTERS]
            raise
        finally:
            query.seconds = time.monotonic() - query.started_at

    def summarize(self) -> QuerySummary:
        """The queries' counts, tokens and cost, and the queries as a tree."""
        return QuerySummary(
            asked=self._asked,
            failed=self._failed,
            **asdict(self.budget.usage),
            tree=tuple(query.to_json() for query in self.queries),
        )
