"""The query functions that the host offers to code at one depth, and the limit on recursive queries."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ..errors import BudgetExceeded, DeadlineExceeded, DepthExceeded, QueryError, RlmBatchError
from ..model_reply import read_value
from ..wire.names import MAX_PROMPTS
from .budget import NO_ESTIMATE
from .flat_request import FlatRequest, find_last_text
from .records import Model
from .session import FLAT_KIND, RECORDED_CHARACTERS, Query, QuerySession, RequestOptions


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class QueryContext:
    """The context of a recursive query, as the asking code sent it."""

    text: str = ""  # the context as text, or as JSON if `is_json`
    path: str = ""  # path of a file in the sandbox that has the context instead of `text`
    is_json: bool = False  # The context is a JSON value other than a text.
    shape: str = ""  # type and size of the context, such as "a list of 50 items"; "" if there is no context
    preview: str = ""  # first characters of the context


TEXTS = TypeAdapter(Annotated[list[str], Field(max_length=MAX_PROMPTS)])
# Answers a recursive query with a JSON value. Arguments: the query functions for the model's code, the prompt, the
# context and the query's record.
AnswerRecursively = Callable[["Queries", str, QueryContext, Query], Awaitable[Any]]


class Queries:
    """The query functions for code at one depth. `tools` has the functions that the driver calls, by name.

    Args:
        session: The session of the top-level execution.
        recurse: Answers a recursive query, or refuses one that is deeper than `max_depth`.
        max_depth: The greatest depth of recursive queries.
        depth: The depth of the code. Plain code has depth 0. Queries from code at depth d have depth d + 1.
        parent: The recursive query whose model wrote the code, or None for plain code.
        numbers: The path to the code: the top-level execution's number, then the number of each recursive query within
            the code that asked it.
        named_model: The model that `rlm_query(model=...)` has named, for this code's own model and those below it.
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
        named_model: Model | None = None,
    ) -> None:
        self.named_model = named_model
        self.root_model = named_model or session.root_model
        self.numbers = numbers
        self.session = session
        self.max_depth = max_depth
        self.depth = depth
        self._recurse = recurse
        self.is_top_level = parent is None
        self._parent = parent
        self._recursive_count = 0  # recursive queries asked so far
        self._recursion_slots = asyncio.Semaphore(session.concurrency)  # limits only the queries of this code
        self.tools: dict[str, Callable[..., Any]] = {
            "llm_query": self._ask_model,
            "llm_query_batched": self._ask_model,
            "rlm_query": self._ask_recursive_model,
            "rlm_query_batched": self._ask_recursive_model,
        }

    async def _ask_model(self, prompts: Any, **arguments: Any) -> list[dict[str, str]]:
        session, request = self.session, FlatRequest.read(prompts, **arguments)
        options = RequestOptions(request.temperature, request.max_tokens, request.response_format)
        model = session.flat_model if request.model is None else session.models.get(request.model)
        refusal = ""
        if model is not None:
            questions = [request.build_messages(prompt) for prompt in request.prompts]
            refusal = await session.find_batch_problem(model, questions, options)

        async def answer(prompt: Any, query: Query, _index: int) -> str:
            if refusal:
                raise BudgetExceeded(refusal)
            if model is None:
                raise self._make_model_error(query.model)
            text = (await session.ask(model, request.build_messages(prompt), query, options)).text
            return text if request.response_format is None else read_value(text)

        name = str(request.model)[:RECORDED_CHARACTERS] if model is None else model.name
        return await self._answer_all(FLAT_KIND, name, request.prompts, request.concurrency, answer)

    def _make_model_error(self, name: str) -> QueryError:
        names = ", ".join(map(repr, self.session.models)) or "none, because models is not set"
        return QueryError(f"no model {name!r} is allowed here: the names are {names}")

    async def _ask_recursive_model(
        self, prompts: Any, *, concurrency: int | None, context: dict[str, Any], model: str | None = None
    ) -> list[dict[str, str]]:
        session, query_context = self.session, QueryContext(**context)
        named_model = self.named_model if model is None else session.models.get(str(model))
        texts = TEXTS.validate_python(prompts)
        first_number = self._recursive_count
        self._recursive_count += len(texts)
        refusal = session.budget.find_batch_problem([NO_ESTIMATE] * len(texts))

        async def answer(prompt: str, query: Query, index: int) -> str:
            if refusal:
                raise BudgetExceeded(refusal)
            if model is not None and named_model is None:
                raise self._make_model_error(query.model)
            return await self._answer(self._recurse, prompt, query_context, query, first_number + index, named_model)

        name = str(model)[:RECORDED_CHARACTERS] if named_model is None else named_model.name
        if model is None:
            name = self.root_model.name
        return await self._answer_all("rlm_query", name, texts, concurrency, answer)

    async def ask(self, prompt: str, context: QueryContext, recurse: AnswerRecursively) -> tuple[str, Any]:
        """Return the answer to a recursive query of the host, as text and as a JSON value.

        `recurse` answers only this query, and not the queries of the model's code.

        Raises QueryError, BudgetExceeded, DepthExceeded and DeadlineExceeded.
        """
        session = self.session
        query = Query("rlm_query", self.depth + 1, session.root_model.name, prompt[:RECORDED_CHARACTERS])
        work = partial(self._answer, recurse, prompt, context, query, 0)
        text = await session.run_recorded(query, self._parent, work)
        return text, query.value

    async def _answer(
        self,
        recurse: AnswerRecursively,
        prompt: str,
        context: QueryContext,
        query: Query,
        number: int,
        named_model: Model | None = None,
    ) -> str:
        """Answer recursive query `number` of this code. Return the answer as text, and set the query's value."""
        session = self.session
        session.check_seconds_left()
        try:
            async with asyncio.timeout_at(session.deadline), self._recursion_slots:
                queries = Queries(
                    session,
                    self._recurse,
                    max_depth=self.max_depth,
                    depth=query.depth,
                    parent=query,
                    numbers=(*self.numbers, number),
                    named_model=named_model,
                )
                value = query.value = await recurse(queries, prompt, context, query)
        except TimeoutError:
            raise session.make_deadline_error() from None
        return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)

    async def _answer_all(
        self,
        kind: str,
        model: str,
        prompts: Sequence[Any],
        concurrency: int | None,
        answer: Callable[[Any, Query, int], Awaitable[str]],
    ) -> list[dict[str, str]]:
        """Return replies in the order of the prompts. `answer` gets each prompt with its record and its index."""
        limit = self.session.concurrency
        if concurrency is not None:
            limit = max(1, min(int(concurrency), limit))
        unanswered = iter(enumerate(prompts))
        replies: list[dict[str, str]] = [{}] * len(prompts)

        async def work() -> None:
            for index, prompt in unanswered:
                await asyncio.sleep(0)  # thousands of refused queries, which never wait, must not block the event loop
                replies[index] = await self._reply(kind, model, prompt, index, answer)

        await asyncio.gather(*(work() for _ in range(min(limit, len(prompts)))))
        return replies

    async def _reply(
        self, kind: str, model: str, prompt: Any, index: int, answer: Callable[[Any, Query, int], Awaitable[str]]
    ) -> dict[str, str]:
        """Return the reply to one prompt: its answer, or its error with a type that the code knows."""
        turn = 0 if self._parent is None else len(self._parent.trajectory)
        query = Query(kind, self.depth + 1, model, find_last_text(prompt)[:RECORDED_CHARACTERS], turn)
        try:
            text = await self.session.run_recorded(query, self._parent, partial(answer, prompt, query, index))
        except RlmBatchError as error:
            error_type = type(error) if type(error) in _ERRORS_OF_CODE else QueryError
            return {"error": error_type.__name__, "message": str(error)}
        return {"answer": text}


_ERRORS_OF_CODE = (BudgetExceeded, DepthExceeded, DeadlineExceeded, QueryError)
