"""The host's side of queries: what code may ask, what it costs, and what became of it.

One `Tree` stands for a top-level execution and all that is asked below it: one budget, one deadline, and one limit on
what is asked of the model at once. That limit is held by requests to the model alone, never by a query that waits for
others, so that no depth of recursion can deadlock it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .budget import Budget, Usage
from .errors import BudgetExceeded, DeadlineExceeded, DepthExceeded, QueryError, RlmBatchError
from .meta import QuerySummary
from .result import Result

Message = dict[str, str]  # role and content, as in OpenAI's chat API
SHOWN = 200  # characters of a prompt and of an error that stand in a record
RECORDS = 1000  # queries of a tree that are recorded one by one; the rest are counted
MARGIN = 1.0  # seconds, or a twentieth of a shorter timeout, before its end: in them code can submit what it has


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered, and what that took."""

    text: str
    usage: Usage


class NoAnswerError(Exception):
    """A request that was taken and counted, and has no answer: `usage` is what it took nonetheless.

    Between a model and the tree that asks it; code is told of a QueryError.
    """

    def __init__(self, message: str, usage: Usage) -> None:
        super().__init__(message)
        self.usage = usage


class Model(Protocol):
    """A language model. `name` is its own, and stands in records."""

    name: str

    async def ask(self, messages: list[Message]) -> Answer:
        """The model's answer. Raises QueryError, and Unanswered where there is none and tokens were used."""
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
    children: list[Query] = field(default_factory=list["Query"])

    def __str__(self) -> str:
        return f"{self.kind} at depth {self.depth}, {self.model}"

    @property
    def usage_text(self) -> str:
        """Its tokens and cost, for a person."""
        used = self.usage
        price = "cost unknown" if used.cost is None else f"${used.cost:.6f}"
        return f"{used.calls} calls, {used.prompt_tokens} + {used.completion_tokens} tokens, {price}"

    def to_json(self) -> dict[str, Any]:
        """The record, with those of the queries below it."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "depth": self.depth,
            "model": self.model,
            "prompt": self.prompt,
            "seconds": round(self.seconds, 6),
            "calls": self.usage.calls,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cost": self.usage.cost,
        }
        if self.error:
            found["error"] = self.error
        if self.trajectory:
            found["trajectory"] = self.trajectory
        if self.children:
            found["queries"] = [child.to_json() for child in self.children]
        return found


@dataclass(frozen=True, slots=True)
class QueryContext:
    """The context of a recursive query: a text, or the path of a file in the sandbox with its length and beginning."""

    text: str = ""
    path: str = ""
    length: int = 0
    preview: str = ""


AnswerRecursively = Callable[
    ["Queries", str, QueryContext, Query], Awaitable[str]
]  # the code's queries, prompt, context, its record


class CodeRunner(Protocol):
    """What a recursive query needs of the interpreter in whose sandbox its model's code runs."""

    async def execute(
        self,
        code: str,
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        context: str | None = None,
        output_fields: list[dict[str, str]] | None = None,
        queries: Queries | None = None,
    ) -> Result:
        """Runs the code and returns what it submitted; see `Interpreter.execute`."""
        ...

    async def forget_context(self, context: str) -> None:
        """Ends a context; its name begins anew with the next execution."""
        ...


RunTracked = Callable[[Query, Callable[[], Awaitable[str]]], Awaitable[str]]


async def run_untracked(_query: Query, work: Callable[[], Awaitable[str]]) -> str:
    """Does the work, and tells nobody."""
    return await work()


class QuerySession:
    """What a top-level execution and all queries below it share.

    `flat` answers `llm_query`, and `root` takes a recursive model's own turns. `concurrency` is how many requests may
    be under way at once. `recurse` answers a recursive query, and `track` is told of each query. `deadline` is by the
    event loop's clock, None for none; the execution sets it when its code is sent.
    """

    def __init__(
        self,
        *,
        root: Model,
        flat: Model,
        budget: Budget,
        concurrency: int,
        max_depth: int,
        recurse: AnswerRecursively,
        track: RunTracked = run_untracked,
    ) -> None:
        self.root_model = root
        self.flat_model = flat
        self.budget = budget
        self.concurrency = concurrency
        self.max_depth = max_depth
        self.recurse = recurse
        self.track = track
        self.deadline: float | None = None
        self._under_way = asyncio.Semaphore(concurrency)
        self._asked = self._failed = self._recorded = 0
        self.queries: list[Query] = []

    def set_deadline(self, timeout: float | None) -> None:
        """Sets the deadline of all queries by the timeout of the code that asks, in seconds."""
        if timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + timeout - min(MARGIN, timeout / 20)

    def check_seconds_left(self) -> float | None:
        """The seconds until the deadline; None where there is none. Raises DeadlineExceeded."""
        if self.deadline is None:
            return None
        left = self.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise self.make_deadline_error()
        return left

    @staticmethod
    def make_deadline_error() -> DeadlineExceeded:
        return DeadlineExceeded("the time for queries is over: give the execution a longer timeout, or ask for less")

    async def ask(self, model: Model, messages: list[Message], query: Query) -> Answer:
        """One request to a model. Raises BudgetExceeded, DeadlineExceeded and QueryError."""
        self.check_seconds_left()
        most = await model.estimate_max_usage(messages) if self.budget.needs_estimates else (0, 0.0)
        try:
            async with asyncio.timeout_at(self.deadline), self._under_way:
                # Not before: what waits for its turn shall not hold what others could use, or give back.
                reservation = self.budget.reserve(*most)
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
        if self._recorded < RECORDS:
            self._recorded += 1
            (self.queries if parent is None else parent.children).append(query)
        try:
            return await self.track(query, work)
        except BaseException as error:
            self._failed += 1
            text = error.summary if isinstance(error, RlmBatchError) else str(error)
            query.error = f"{type(error).__name__}: {text}"[:SHOWN]
            raise
        finally:
            query.seconds = time.monotonic() - query.started_at

    def summarize(self) -> QuerySummary:
        """The queries' counts, tokens and cost, and the queries as a tree."""
        used = self.budget.usage
        return QuerySummary(
            asked=self._asked,
            failed=self._failed,
            calls=used.calls,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cost=used.cost,
            tree=tuple(query.to_json() for query in self.queries),
        )


class Queries:
    """What code at one depth may ask: `tools` are the functions that its driver calls.

    Plain code has depth 0. A query that code at depth d asks runs at d + 1; a recursive one beyond the tree's
    `max_depth` is refused. `interpreter` is the one whose sandbox the code runs in.
    """

    def __init__(
        self, tree: QuerySession, interpreter: CodeRunner, *, depth: int = 0, parent: Query | None = None
    ) -> None:
        self.session = tree
        self.interpreter = interpreter
        self.depth = depth
        self.is_top_level = parent is None
        self._parent = parent
        self._recursions = asyncio.Semaphore(tree.concurrency)  # of this code; those below them have their own
        self.tools: dict[str, Callable[..., Any]] = {
            "llm_query": self._llm,
            "llm_query_batched": self._llm,
            "rlm_query": self._rlm,
            "rlm_query_batched": self._rlm,
        }

    def make_child(self, query: Query) -> Queries:
        """What the code of a recursive query may ask."""
        return Queries(self.session, self.interpreter, depth=self.depth + 1, parent=query)

    async def _llm(self, prompts: list[str], *, concurrency: int | None) -> list[dict[str, str]]:
        async def one(prompt: str) -> str:
            model = self.session.flat_model
            query = Query("llm_query", self.depth + 1, model.name, prompt[:SHOWN])

            async def work() -> str:
                return (await self.session.ask(model, [{"role": "user", "content": prompt}], query)).text

            return await self.session.run_recorded(query, self._parent, work)

        return await self._all(prompts, concurrency, one)

    async def _rlm(
        self, prompts: list[str], *, concurrency: int | None, context: dict[str, Any]
    ) -> list[dict[str, str]]:
        given = QueryContext(**context)

        async def one(prompt: str) -> str:
            query = Query("rlm_query", self.depth + 1, self.session.root_model.name, prompt[:SHOWN])

            async def work() -> str:
                if self.depth + 1 > self.session.max_depth:
                    raise DepthExceeded(
                        f"a recursive query here would run at depth {self.depth + 1}, and the greatest is "
                        f"{self.session.max_depth}: use llm_query, or raise max_depth"
                    )
                self.session.check_seconds_left()
                try:
                    async with asyncio.timeout_at(self.session.deadline), self._recursions:
                        return await self.session.recurse(self.make_child(query), prompt, given, query)
                except TimeoutError:
                    raise self.session.make_deadline_error() from None

            return await self.session.run_recorded(query, self._parent, work)

        return await self._all(prompts, concurrency, one)

    async def _all(
        self, prompts: list[str], concurrency: int | None, one: Callable[[str], Awaitable[str]]
    ) -> list[dict[str, str]]:
        """Replies in the order of the prompts. What the code has sent is the code's word: it may be anything."""
        most = self.session.concurrency if concurrency is None else min(int(concurrency), self.session.concurrency)
        under_way = asyncio.Semaphore(max(1, most))

        async def reply(prompt: str) -> dict[str, str]:
            try:
                async with under_way:
                    return {"answer": await one(str(prompt))}
            except RlmBatchError as error:
                kind = type(error) if type(error) in _TOLD else QueryError
                return {"error": kind.__name__, "message": str(error)}

        return list(await asyncio.gather(*map(reply, prompts)))


_TOLD = (BudgetExceeded, DepthExceeded, DeadlineExceeded, QueryError)
