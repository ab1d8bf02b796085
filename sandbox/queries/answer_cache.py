"""A cache of model answers. Identical questions asked at the same time share one request.

A question is a model, its settings, the messages and the request's options. The cache does not keep failures.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

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


def build_key(fingerprint: dict[str, Any], messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return a hash of a model's fingerprint, the messages and the options. Without options it is as in version 1.0."""
    parts = {"model": fingerprint, "messages": messages, **({"options": options} if options else {})}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerCache:
    """A cache in front of a model: it answers from a store and asks the model only for missing answers.

    A caller waits if another caller is already asking the same question. If the asking caller is cancelled, or fails
    because of its own deadline or budget, the next waiting caller asks. If the model fails, all waiting callers get its
    QueryError. Use one cache on one event loop only.

    Args:
        store: Storage of the answers.
        execution: None for a cache. Otherwise the store has answers for the attempts of this execution alone, and a
            question that one attempt asks twice has two answers.
    """

    def __init__(self, store: AnswerStore, execution: str | None = None) -> None:
        self._store = store
        self._in_flight: dict[str, asyncio.Future[str | QueryError | None]] = {}  # None: the next caller must ask
        self.execution = execution
        self._counts = Counter[str]()  # how often an execution asked each question
        self.hits = 0  # questions answered without a request

    async def get_answer(self, key: str, model: str, ask: Callable[[], Awaitable[str]]) -> str:
        """Return the stored answer to the question with this key, or the result of `ask` and store it.

        `model` is the model's name, for records. Raises QueryError and the errors of `ask`.
        """
        if self.execution is not None:
            self._counts[key] += 1
            key = hashlib.sha256(f"{self.execution} {key} {self._counts[key]}".encode()).hexdigest()
        while (flight := self._in_flight.get(key)) is not None:
            # The shield keeps a cancelled caller from cancelling the request for the others.
            outcome = await asyncio.shield(flight)
            if isinstance(outcome, QueryError):
                raise type(outcome)(str(outcome))
            if outcome is not None:
                self.hits += 1
                return outcome
        text = self._store.find_answer(key)
        if text is not None:
            self.hits += 1
            return text
        flight = self._in_flight[key] = asyncio.get_running_loop().create_future()
        outcome = None
        try:
            outcome = await ask()
            self._store.add_answer(key, model, outcome)
            return outcome
        except QueryError as error:
            outcome = error
            raise
        finally:
            del self._in_flight[key]
            flight.set_result(outcome)
