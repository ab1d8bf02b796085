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

from ..errors import BudgetExceeded, DeadlineExceeded, QueryError, RlmBatchError
from ..meta import QuerySummary
from .answer_cache import AnswerCache, build_question
from .budget import Budget, Usage

FLAT_KIND = "llm_query"  # of a query that is one question
Message = dict[str, str]  # role and content, as in OpenAI's chat API
RECORDED_CHARACTERS = 200  # of a prompt and of an error that stand in a record
MAX_RECORDED_QUERIES = 1000  # of a session; the rest are counted
# Of a session whose calls are limited: they cost nothing, and a loop that asks forever shall end before its timeout.
MAX_CACHED_ANSWERS = 100_000
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

    def fingerprint(self) -> dict[str, Any]:
        """What an answer depends on beside the messages, as JSON: the model, its address, its sampling; no secrets."""
        ...


@dataclass(slots=True)
class Query:
    """One query as it is recorded. `usage` is its own calls', not those of the queries below it.

    `turn` is the number, from 1, of the turn of a recursive query whose code has asked it; 0 where plain code has.
    `cached` is how many of its own questions were answered without a call.
    """

    kind: str
    depth: int
    model: str
    prompt: str
    turn: int = 0
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    cached: int = 0
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
        cached = f", {self.cached} from the cache" if self.cached else ""
        return f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens, {price}{cached}"

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
        if self.cached:
            record["cached"] = self.cached
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
    none; the execution sets it when its code is sent. With a `cache` questions that it has are not asked: they take
    nothing from the budget, nobody is told of them, and where calls are limited there are 100,000 of them at most.
    """

    root_model: Model
    flat_model: Model
    budget: Budget
    concurrency: int
    track: RunTracked = run_untracked
    deadline: float | None = None
    cache: AnswerCache | None = None
    queries: list[Query] = field(default_factory=list[Query])

    def __post_init__(self) -> None:
        self._request_slots = asyncio.Semaphore(self.concurrency)
        self._asked = self._failed = self._recorded = self._cached = 0

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
        """A model's answer to one of the query's own questions, by a request or from the cache.

        Raises BudgetExceeded, DeadlineExceeded and QueryError.
        """
        if self.cache is None:
            return await self._request(model, messages, query)
        self.check_seconds_left()
        answer: Answer | None = None

        async def request() -> str:
            nonlocal answer
            answer = await self._request(model, messages, query)
            return answer.text

        async def request_tracked() -> str:
            # Of a recursive query the whole is tracked, and of a flat one only what asks the model.
            return await (self.track(query, request) if query.kind == FLAT_KIND else request())

        question = build_question(model.name, model.fingerprint(), messages)
        try:
            async with asyncio.timeout_at(self.deadline):
                text = await self.cache.get_answer(question, request_tracked)
        except TimeoutError:
            raise self.make_deadline_error() from None
        if answer is not None:
            return answer
        if self._cached >= MAX_CACHED_ANSWERS and self.budget.remaining_calls is not None:
            raise BudgetExceeded(
                f"{MAX_CACHED_ANSWERS:,} questions were answered from the cache, which are all that an execution with "
                "limited calls may have: ask for less, or set max_llm_calls to None"
            )
        self._cached += 1
        query.cached += 1
        return Answer(text, Usage())

    async def _request(self, model: Model, messages: list[Message], query: Query) -> Answer:
        """One request to a model."""
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
            is_tracked_later = self.cache is not None and query.kind == FLAT_KIND
            return await (work() if is_tracked_later else self.track(query, work))
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
            cached=self._cached,
            tree=tuple(query.to_json() for query in self.queries),
        )
