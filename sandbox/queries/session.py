"""Queries of one top-level execution: what its code may ask, within which limits, and the record of it.

One `QuerySession` stands for a top-level execution and all that is asked below it: one budget, one deadline, and one
limit on what is asked of the model at once. That limit is held by requests to the model alone, never by a query that
waits for others, so that no depth of recursion can deadlock it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from ..errors import BudgetExceeded, DeadlineExceeded, DepthExceeded, QueryError, RlmBatchError
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
    """One query as it is recorded. `usage` is its own calls', not those of the queries below it."""

    kind: str
    depth: int
    model: str
    prompt: str
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
        if self.error:
            record["error"] = self.error
        if self.trajectory:
            record["trajectory"] = self.trajectory
        if self.children:
            record["queries"] = [child.to_json() for child in self.children]
        return record


@dataclass(frozen=True, slots=True)
class QueryContext:
    """The context of a recursive query: a text, or the path of a file in the sandbox with its length and beginning."""

    text: str = ""
    path: str = ""
    length: int = 0
    preview: str = ""


# Answers a recursive query: what its code may ask, its prompt, its context, its record.
AnswerRecursively = Callable[["Queries", str, QueryContext, Query], Awaitable[str]]
# Does a query's work and tells somebody of it.
RunTracked = Callable[[Query, Callable[[], Awaitable[str]]], Awaitable[str]]


async def run_untracked(_query: Query, work: Callable[[], Awaitable[str]]) -> str:
    """Does a query's work without telling anybody."""
    return await work()


@dataclass(kw_only=True, eq=False)
class QuerySession:
    """What a top-level execution and all queries below it share.

    `flat_model` answers `llm_query`, and `root_model` takes a recursive model's own turns. `concurrency` is how many
    requests may be under way at once. `recurse` answers a recursive query, and `track` is told of each query.
    `deadline` is by the event loop's clock, None for none; the execution sets it when its code is sent.
    """

    root_model: Model
    flat_model: Model
    budget: Budget
    concurrency: int
    max_depth: int
    recurse: AnswerRecursively
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
                        raise QueryError(str(error)) from error
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


class Queries:
    """What code at one depth may ask: `tools` are the functions that its driver calls.

    Plain code has depth 0. A query that code at depth d asks runs at d + 1; a recursive one beyond the session's
    `max_depth` is refused.
    """

    def __init__(self, session: QuerySession, *, depth: int = 0, parent: Query | None = None) -> None:
        self.session = session
        self.depth = depth
        self.is_top_level = parent is None
        self._parent = parent
        self._recursions = asyncio.Semaphore(session.concurrency)  # of this code; those below them have their own
        self.tools: dict[str, Callable[..., Any]] = {
            "llm_query": self._ask_model,
            "llm_query_batched": self._ask_model,
            "rlm_query": self._ask_recursive_model,
            "rlm_query_batched": self._ask_recursive_model,
        }

    async def _ask_model(self, prompts: list[str], *, concurrency: int | None) -> list[dict[str, str]]:
        session = self.session

        async def answer(prompt: str, query: Query) -> str:
            return (await session.ask(session.flat_model, [{"role": "user", "content": prompt}], query)).text

        return await self._answer_all("llm_query", session.flat_model, prompts, concurrency, answer)

    async def _ask_recursive_model(
        self, prompts: list[str], *, concurrency: int | None, context: dict[str, Any]
    ) -> list[dict[str, str]]:
        session, query_context = self.session, QueryContext(**context)

        async def answer(prompt: str, query: Query) -> str:
            if query.depth > session.max_depth:
                raise DepthExceeded(
                    f"a recursive query here would run at depth {query.depth}, and the greatest is "
                    f"{session.max_depth}: use llm_query, or raise max_depth"
                )
            session.check_seconds_left()
            try:
                async with asyncio.timeout_at(session.deadline), self._recursions:
                    queries = Queries(session, depth=query.depth, parent=query)
                    return await session.recurse(queries, prompt, query_context, query)
            except TimeoutError:
                raise session.make_deadline_error() from None

        return await self._answer_all("rlm_query", session.root_model, prompts, concurrency, answer)

    async def _answer_all(
        self,
        kind: str,
        model: Model,
        prompts: list[str],
        concurrency: int | None,
        answer: Callable[[str, Query], Awaitable[str]],
    ) -> list[dict[str, str]]:
        """Replies in the order of the prompts. What the code has sent is the code's word: it may be anything."""
        session = self.session
        limit = session.concurrency if concurrency is None else min(int(concurrency), session.concurrency)
        slots = asyncio.Semaphore(max(1, limit))

        async def reply(prompt: str) -> dict[str, str]:
            try:
                async with slots:
                    query = Query(kind, self.depth + 1, model.name, prompt[:RECORDED_CHARACTERS])
                    work = partial(answer, prompt, query)
                    return {"answer": await session.run_recorded(query, self._parent, work)}
            except RlmBatchError as error:
                error_kind = type(error) if type(error) in _ERRORS_OF_CODE else QueryError
                return {"error": error_kind.__name__, "message": str(error)}

        return list(await asyncio.gather(*map(reply, map(str, prompts))))


_ERRORS_OF_CODE = (BudgetExceeded, DepthExceeded, DeadlineExceeded, QueryError)
