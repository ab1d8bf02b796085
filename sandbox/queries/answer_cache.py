"""Answers that a model need not be asked for again: a question is asked once, however many ask it at the same time.

A question is a model with its settings, and the messages. What failed is not kept: whoever asks next asks the model.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from ..errors import QueryError


class AnswerStore(Protocol):
    """Where answers are between the questions. Its methods return at once, and raise nothing."""

    def find_answer(self, key: str) -> str | None:
        """The answer to the question with that key, None where there is none."""
        ...

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Keeps the answer of the model of that name."""
        ...


class MemoryAnswers:
    """Keeps answers for as long as it exists."""

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}

    def find_answer(self, key: str) -> str | None:
        return self._answers.get(key)

    def add_answer(self, key: str, model: str, text: str) -> None:
        self._answers[key] = text


class Question(NamedTuple):
    """What is asked: `key` is the same for the same question, and `model` the model's name, for records."""

    key: str
    model: str


def build_question(model: str, fingerprint: dict[str, Any], messages: list[dict[str, str]]) -> Question:
    """The question that these messages are to a model with that fingerprint. It has the hash of both and no text."""
    parts = {"model": fingerprint, "messages": messages}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    return Question(hashlib.sha256(text.encode()).hexdigest(), model)


class AnswerCache:
    """Answers questions from a store, and those that it has not by asking, each once at a time.

    Whoever asks what another is asking waits for that answer. Where the other was cancelled or refused, by its own
    deadline or budget, the next that waits asks; where the model did not answer, all that wait have that QueryError.
    Used on one event loop.
    """

    def __init__(self, store: AnswerStore) -> None:
        self._store = store
        self._in_flight: dict[str, asyncio.Future[str | QueryError | None]] = {}  # None: nobody knows, ask again
        self.hits = 0  # questions that were answered without asking

    async def get_answer(self, question: Question, ask: Callable[[], Awaitable[str]]) -> str:
        """The answer, which `ask` returns where nobody has it. Raises QueryError, and what `ask` raises."""
        while (flight := self._in_flight.get(question.key)) is not None:
            # Shielded: who waits and is cancelled must not cancel it for the others.
            outcome = await asyncio.shield(flight)
            if isinstance(outcome, QueryError):
                raise QueryError(str(outcome))
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
