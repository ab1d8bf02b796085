"""A cache of model answers. Identical questions asked at the same time share one request.

A question is a model, its settings, the messages and the request's options. The cache does not keep failures.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from ..errors import QueryError


class AnswerStore(Protocol):
    """Storage of answers. Its methods must return at once and must not raise."""

    def find_answer(self, key: str) -> str | None:
        """Return the answer to the question with this key, or None."""
        ...

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Store an answer from the model with this name."""
        ...


class MemoryAnswers:
    """An answer store in memory."""

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}

    def find_answer(self, key: str) -> str | None:
        return self._answers.get(key)

    def add_answer(self, key: str, model: str, text: str) -> None:
        self._answers[key] = text


class Question(NamedTuple):
    """A question: `key` is equal for identical questions, and `model` is the model's name, for records."""

    key: str
    model: str


def build_question(
    model: str, fingerprint: dict[str, Any], messages: list[dict[str, Any]], options: dict[str, Any]
) -> Question:
    """Return the question for these messages. Its key is a hash of the fingerprint, the messages and the options.

    Without options, the key has the form of earlier versions.
    """
    parts = {"model": fingerprint, "messages": messages, **({"options": options} if options else {})}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    return Question(hashlib.sha256(text.encode()).hexdigest(), model)


class AnswerCache:
    """A cache in front of a model: it answers from a store and asks the model only for missing answers.

    A caller waits if another caller is already asking the same question. If the asking caller is cancelled, or fails
    because of its own deadline or budget, the next waiting caller asks. If the model fails, all waiting callers get its
    QueryError. Use one cache on one event loop only.
    """

    ignores_instructions: ClassVar[bool] = False  # True if the system messages of recursive models may differ

    def __init__(self, store: AnswerStore) -> None:
        self._store = store
        self._in_flight: dict[str, asyncio.Future[str | QueryError | None]] = {}  # None: the next caller must ask
        self.hits = 0  # questions answered without a request

    async def get_answer(self, question: Question, ask: Callable[[], Awaitable[str]]) -> str:
        """Return the cached answer, or the result of `ask`. Raises QueryError and the errors of `ask`."""
        while (flight := self._in_flight.get(question.key)) is not None:
            # The shield keeps a cancelled caller from cancelling the request for the others.
            outcome = await asyncio.shield(flight)
            if isinstance(outcome, QueryError):
                raise type(outcome)(str(outcome))
            if outcome is not None:
                self.hits += 1
                return outcome
        text = self._store.find_answer(question.key)
        if text is not None:
            self.hits += 1
            return text
        flight = self._in_flight[question.key] = asyncio.get_running_loop().create_future()
        outcome = None
        try:
            outcome = await ask()
            self._store.add_answer(question.key, question.model, outcome)
            return outcome
        except QueryError as error:
            outcome = error
            raise
        finally:
            del self._in_flight[question.key]
            flight.set_result(outcome)


class ReplayedAnswers(AnswerCache):
    """The answers to the questions of one execution, for another attempt that continues where this one was interrupted.

    Unlike a cache, it gives a question that the execution asks twice two answers.
    """

    ignores_instructions = True  # They have the calls that are left. An execution's key has all else of them.

    def __init__(self, store: AnswerStore, execution: str) -> None:
        """Create the cache. Attempts with the same `execution` get each other's answers."""
        super().__init__(store)
        self._execution = execution
        self._counts = Counter[str]()  # how often each question was asked

    async def get_answer(self, question: Question, ask: Callable[[], Awaitable[str]]) -> str:
        """Return an earlier attempt's answer, or the result of `ask`. Raises QueryError and the errors of `ask`."""
        self._counts[question.key] += 1
        text = f"{self._execution} {question.key} {self._counts[question.key]}"
        return await super().get_answer(Question(hashlib.sha256(text.encode()).hexdigest(), question.model), ask)
