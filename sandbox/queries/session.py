"""The queries of one top-level execution: their limits and their records.

A `QuerySession` serves a top-level execution and all queries below it. They share a budget, a deadline and a limit on
concurrent requests. Only a request to the model counts towards the limit. A query that waits for other queries does not
count, so deep recursion cannot cause a deadlock.
"""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import DeadlineExceeded, QueryError, RlmBatchError
from ..meta import QuerySummary
from ..model_reply import split_thoughts
from ..outcomes.text_escape import SecretFilter
from .answer_cache import AnswerCache, build_key, remove_limits
from .budget import NO_ESTIMATE, Budget, Estimate, Usage
from .records import (
    DEFAULT_OPTIONS,
    Answer,
    Message,
    Model,
    OnEvent,
    Query,
    RequestOptions,
    RlmEvent,
    Transcript,
    shorten,
)

FLAT_KIND = "llm_query"  # kind of a query that asks one question
RECORDED_CHARACTERS = 200  # prompts and errors in a record are cut to this length
RECORDED_ANSWER_CHARACTERS = 2_000  # the same for answers
MAX_RECORDED_QUERIES = 1000  # per session; further queries are only counted
# Seconds from the end of queries to the code's timeout, but at most 1/20 of the timeout. In this time the code can
# submit its partial results.
DEADLINE_MARGIN_SECONDS = 1.0


class EmptyAnswerError(QueryError):
    """The error of an answer that is empty or incomplete. For code it is a QueryError. A recursive model continues.

    `answer` has the received part of the answer, and its usage.
    """

    def __init__(self, message: str, answer: Answer | None = None, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.answer = Answer("", Usage()) if answer is None else _separate_thoughts(answer)


async def estimate_for_budget(
    budget: Budget, model: Model, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS
) -> Estimate:
    """Return the most tokens and cost that a call can use. What the budget does not limit is left out.

    Raises ConfigurationError if the model cannot tell what the budget limits.
    """
    if not (budget.limits_tokens or budget.limits_cost):
        return NO_ESTIMATE
    return await model.estimate_max_usage(messages, options, is_priced=budget.limits_cost)


# Runs a query's work and returns its result. Meanwhile it reports the query, for example as a task run.
RunTracked = Callable[[Query, Callable[[], Awaitable[Any]]], Awaitable[Any]]


async def run_untracked(_query: Query, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a query's work without reporting it."""
    return await work()


@dataclass(kw_only=True, eq=False)
class QuerySession:
    """The state that a top-level execution shares with all queries below it.

    Cached answers use no budget and are not tracked.
    """

    root_model: Model  # the model of recursive queries
    flat_model: Model  # the model of `llm_query`
    budget: Budget
    concurrency: int  # maximum number of concurrent requests
    models: Mapping[str, Model] = field(default_factory=dict[str, Model])  # the models that code may choose, by name
    track: RunTracked = run_untracked
    deadline: float | None = None  # time of the event loop's clock, which the execution sets when it sends its code
    cache: AnswerCache | None = None
    # Called with each event. If it raises an exception, no further question is asked, and the execution raises it.
    on_event: OnEvent | None = None
    transcript: Transcript | None = None
    index: int = 0  # number of the execution in its run
    hide: SecretFilter | None = None  # the sandbox's filter of secrets, for records; set when code is sent
    queries: list[Query] = field(default_factory=list[Query])  # records of the top-level queries

    def __post_init__(self) -> None:
        self._request_slots = asyncio.Semaphore(self.concurrency)
        self._asked = self._failed = self._unsolved = self._recorded = self._cached = 0
        self._usage_by_model: dict[str, Usage] = {}  # usage of the answered calls, by the model's name
        self.listener_error: Exception | None = None  # the exception of `on_event`

    def emit(self, event: RlmEvent) -> None:
        """Pass an event to `on_event`. Keep its exception for the execution, and pass no further event."""
        if self.on_event is None or self.listener_error is not None:
            return
        try:
            self.on_event(replace(event, index=self.index))
        except Exception as error:  # noqa: BLE001 - `Interpreter.run` raises it with its own traceback
            self.listener_error = error

    def set_deadline(self, timeout: float | None) -> None:
        """Set the deadline of all queries from the code's timeout in seconds, less a margin."""
        if timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + timeout - min(DEADLINE_MARGIN_SECONDS, timeout / 20)

    def check_seconds_left(self) -> float:
        """Return the seconds until the deadline, which are infinite without one.

        Raises DeadlineExceeded, and QueryError if `on_event` has raised an exception.
        """
        if self.listener_error is not None:
            raise QueryError(f"no further question is asked, because a listener raised {self.listener_error!r}")
        if self.deadline is None:
            return math.inf
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise self.make_deadline_error()
        return seconds

    @staticmethod
    def make_deadline_error() -> DeadlineExceeded:
        return DeadlineExceeded("no time is left for queries: raise `timeout`, or ask for less")

    async def ask(
        self, model: Model, messages: list[Message], query: Query, options: RequestOptions = DEFAULT_OPTIONS
    ) -> Answer:
        """Return the answer to one question of the query, from the cache or by a request, without thoughts in its text.

        Raises BudgetExceeded, DeadlineExceeded and QueryError.
        """
        started_at = time.monotonic()
        outcome: Answer | RlmBatchError | None = None  # None if the question was cancelled
        try:
            if self.cache is None:
                answer = await self._request(model, messages, query, options)
            else:
                answer = await self._ask_cache(self.cache, model, messages, query, options)
            outcome = _remove_thoughts(model, answer)
            return outcome
        except RlmBatchError as error:
            outcome = error
            raise
        finally:
            if self.transcript is not None and outcome is not None:
                seconds = time.monotonic() - started_at
                self.transcript.add_request(model, messages, options, query, outcome, seconds)

    async def _ask_cache(
        self, cache: AnswerCache, model: Model, messages: list[Message], query: Query, options: RequestOptions
    ) -> Answer:
        """Return the answer in the cache. If it is missing, request it and add it to the cache."""
        self.check_seconds_left()
        is_flat = query.kind == FLAT_KIND

        async def request() -> Answer:
            answer = await self._request(model, messages, query, options)
            _remove_thoughts(model, answer)  # An answer of thoughts alone raises here, and is not cached.
            return answer

        # `run_recorded` tracks a whole recursive query. A flat query is tracked only if it asks the model.
        ask = partial(self.track, query, request) if is_flat else request
        if cache.execution is not None and not is_flat:
            # The instructions say how many calls are left. Another attempt of the execution has fewer.
            messages_of_key = [message for message in messages if message["role"] != "system"]
        else:
            messages_of_key = messages
        if not is_flat and not cache.has_limits_in_keys:
            messages_of_key = remove_limits(messages_of_key)
        key = build_key(model.fingerprint(), messages_of_key, options.list_changed())
        try:
            async with asyncio.timeout_at(self.deadline):
                answer = await cache.get_answer(key, model.name, ask)
        except TimeoutError:
            raise self.make_deadline_error() from None
        if isinstance(answer, str):
            self._cached += 1
            query.cached += 1
            return Answer(answer, Usage())
        return answer

    async def find_batch_problem(
        self, model: Model, questions: Sequence[list[Message]], options: RequestOptions
    ) -> str:
        """Return why a batch of questions would leave no last turn to the recursive model that waits for it, or "".

        Questions that the cache answers do not count.
        """
        if not self.budget.kept:
            return ""
        if self.cache is not None:
            keys = [build_key(model.fingerprint(), messages, options.list_changed()) for messages in questions]
            questions = [questions[index] for index in self.cache.list_missing(keys)]
        maxima = [await estimate_for_budget(self.budget, model, messages, options) for messages in questions]
        return self.budget.find_batch_problem(maxima)

    async def _request(self, model: Model, messages: list[Message], query: Query, options: RequestOptions) -> Answer:
        """Send one request to a model, within the budget and the deadline."""
        self.check_seconds_left()
        maximum = await estimate_for_budget(self.budget, model, messages, options)
        try:
            async with asyncio.timeout_at(self.deadline), self._request_slots:
                # Reserve only now: a request that waits for its slot must not hold budget that others could use.
                settle = await self.budget.reserve(maximum, query.last_turn)
                usage = Usage()  # A cancelled request counts as unused: no provider reports if it was billed.
                try:
                    answer = await model.ask(messages, options)
                    usage = answer.usage
                except EmptyAnswerError as error:
                    usage = error.answer.usage
                    raise
                finally:
                    settle(usage)
                    query.usage += usage
                    if usage.calls:
                        self._usage_by_model[model.name] = self._usage_by_model.get(model.name, Usage()) + usage
        except TimeoutError:
            raise self.make_deadline_error() from None
        return answer

    async def run_recorded(self, query: Query, parent: Query | None, work: Callable[[], Awaitable[str]]) -> str:
        """Run a query's work and record the query."""
        self._asked += 1
        if self.hide is not None:
            query.prompt = self.hide(query.prompt)
        if self.transcript is not None:
            self.transcript.name_query(query, parent)
        if self._recorded < MAX_RECORDED_QUERIES:
            self._recorded += 1
            siblings = self.queries if parent is None else parent.children
            siblings.append(query)
        answer = ""
        try:
            is_tracked_by_cache = self.cache is not None and query.kind == FLAT_KIND
            answer = await work() if is_tracked_by_cache else await self.track(query, work)
            recorded_answer = answer if self.hide is None else self.hide(answer)
            query.answer = shorten(recorded_answer, RECORDED_ANSWER_CHARACTERS)
            return answer
        except BaseException as error:
            self._failed += 1
            self._unsolved += isinstance(error, RlmBatchError) and error.is_failure_of_code
            text = error.summary if isinstance(error, RlmBatchError) else str(error)
            query.error = f"{type(error).__name__}: {text}"[:RECORDED_CHARACTERS]
            raise
        finally:
            query.seconds = time.monotonic() - query.started_at
            is_cancelled = isinstance(sys.exception(), asyncio.CancelledError)
            if not is_cancelled:
                self._end_query(query, parent, answer)

    def _end_query(self, query: Query, parent: Query | None, answer: str) -> None:
        """Add a query that has ended to the counts of its parent, and emit its event."""
        is_question = parent is None and query.kind != FLAT_KIND
        total = query.usage + query.query_usage
        if parent is not None:
            parent.query_count += 1
            parent.query_usage += total
        self.emit(
            RlmEvent(
                kind="answer" if is_question else "query",
                query=query,
                turn=query.turn,
                text=answer if is_question else answer[:RECORDED_CHARACTERS],
                failed=bool(query.error),
                error=query.error,
                usage=total,
                seconds=query.seconds,
            )
        )

    def summarize(self) -> QuerySummary:
        """Return the counts, tokens and cost of the queries, and their records as a tree."""
        return QuerySummary(
            asked=self._asked,
            failed=self._failed,
            unsolved=self._unsolved,
            **asdict(self.budget.usage),
            cached=self._cached,
            usage_by_model={name: asdict(usage) for name, usage in self._usage_by_model.items()},
            tree=tuple(query.to_json() for query in self.queries),
        )


def _remove_thoughts(model: Model, answer: Answer) -> Answer:
    """Return the answer without the thoughts in its text. Raises EmptyAnswerError if it has only thoughts."""
    separated = _separate_thoughts(answer)
    if separated.thoughts and not separated.text:
        raise EmptyAnswerError(f"the model {model.name} gave only thoughts and no answer: raise max_tokens", answer)
    return separated


def _separate_thoughts(answer: Answer) -> Answer:
    """Move the thoughts in the answer's text to its `thoughts`."""
    text, thoughts = split_thoughts(answer.text)
    if answer.thoughts and thoughts:
        thoughts = f"{answer.thoughts}\n\n{thoughts}"
    return replace(answer, text=text, thoughts=thoughts or answer.thoughts)
