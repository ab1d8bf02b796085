"""What code at one depth may ask: the functions that its driver calls, and how deep recursive queries may go."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import BudgetExceeded, DeadlineExceeded, DepthExceeded, QueryError, RlmBatchError
from ..wire.names import MAX_PROMPTS
from .session import FLAT_KIND, RECORDED_CHARACTERS, Model, Query, QuerySession


@dataclass(frozen=True, slots=True)
class QueryContext:
    """The context of a recursive query: a text, or the path of a file in the sandbox with its length and beginning."""

    text: str = ""
    path: str = ""
    length: int = 0
    preview: str = ""


# Answers a recursive query: what its code may ask, its prompt, its context, its record.
AnswerRecursively = Callable[["Queries", str, QueryContext, Query], Awaitable[str]]


class Queries:
    """What code at one depth may ask: `tools` are the functions that its driver calls.

    Plain code has depth 0. A query that code at depth d asks runs at d + 1; a recursive one beyond `max_depth` is
    refused. `recurse` answers a recursive query. `numbers` say which code it is: the number of the top-level execution,
    and of each recursive query on the way to it, in the code that asked that.
    """

    def __init__(
        self,
        session: QuerySession,
        recurse: AnswerRecursively,
        *,
        max_depth: int,
        depth: int = 0,
        parent: Query | None = None,
        numbers: tuple[int, ...] = (0,),
    ) -> None:
        self.numbers = numbers
        self.session = session
        self.max_depth = max_depth
        self.depth = depth
        self._recurse = recurse
        self.is_top_level = parent is None
        self._parent = parent
        self._recursive_count = 0  # recursive queries that it has asked
        self._recursions = asyncio.Semaphore(session.concurrency)  # of this code; those below them have their own
        self.tools: dict[str, Callable[..., Any]] = {
            "llm_query": self._ask_model,
            "llm_query_batched": self._ask_model,
            "rlm_query": self._ask_recursive_model,
            "rlm_query_batched": self._ask_recursive_model,
        }

    async def _ask_model(self, prompts: list[str], *, concurrency: int | None) -> list[dict[str, str]]:
        session = self.session

        async def answer(prompt: str, query: Query, _place: int) -> str:
            return (await session.ask(session.flat_model, [{"role": "user", "content": prompt}], query)).text

        return await self._answer_all(FLAT_KIND, session.flat_model, prompts, concurrency, answer)

    async def _ask_recursive_model(
        self, prompts: list[str], *, concurrency: int | None, context: dict[str, Any]
    ) -> list[dict[str, str]]:
        session, query_context = self.session, QueryContext(**context)
        before = self._recursive_count
        self._recursive_count += len(_check_prompts(prompts))

        async def answer(prompt: str, query: Query, place: int) -> str:
            if query.depth > self.max_depth:
                raise DepthExceeded(
                    f"a recursive query here would run at depth {query.depth}, and the greatest is "
                    f"{self.max_depth}: use llm_query, or raise max_depth"
                )
            session.check_seconds_left()
            try:
                async with asyncio.timeout_at(session.deadline), self._recursions:
                    numbers = (*self.numbers, before + place)
                    queries = Queries(
                        session,
                        self._recurse,
                        max_depth=self.max_depth,
                        depth=query.depth,
                        parent=query,
                        numbers=numbers,
                    )
                    return await self._recurse(queries, prompt, query_context, query)
            except TimeoutError:
                raise session.make_deadline_error() from None

        return await self._answer_all("rlm_query", session.root_model, prompts, concurrency, answer)

    async def _answer_all(
        self,
        kind: str,
        model: Model,
        prompts: list[str],
        concurrency: int | None,
        answer: Callable[[str, Query, int], Awaitable[str]],
    ) -> list[dict[str, str]]:
        """Replies in the order of the prompts; `answer` is told each one's place."""
        _check_prompts(prompts)
        session = self.session
        limit = session.concurrency if concurrency is None else min(int(concurrency), session.concurrency)
        unanswered = iter(enumerate(prompts))
        replies: list[dict[str, str]] = [{}] * len(prompts)

        async def reply(prompt: str, place: int) -> dict[str, str]:
            try:
                turn = 0 if self._parent is None else len(self._parent.trajectory)
                query = Query(kind, self.depth + 1, model.name, prompt[:RECORDED_CHARACTERS], turn)
                run = partial(answer, prompt, query, place)
                return {"answer": await session.run_recorded(query, self._parent, run)}
            except RlmBatchError as error:
                error_kind = type(error) if type(error) in _ERRORS_OF_CODE else QueryError
                return {"error": error_kind.__name__, "message": str(error)}

        async def work() -> None:
            for place, prompt in unanswered:
                await asyncio.sleep(0)  # one that is refused waits for nothing, and there may be thousands
                replies[place] = await reply(prompt, place)

        await asyncio.gather(*(work() for _ in range(min(max(1, limit), len(prompts)))))
        return replies


def _check_prompts(prompts: list[str]) -> list[str]:
    """The prompts. What the code has sent is the code's word: it may be anything."""
    if type(prompts) is not list or any(type(prompt) is not str for prompt in prompts):
        raise TypeError("prompts is a list of texts")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{len(prompts):,} prompts, and one call takes {MAX_PROMPTS:,} at most: ask in several calls")
    return prompts


_ERRORS_OF_CODE = (BudgetExceeded, DepthExceeded, DeadlineExceeded, QueryError)
