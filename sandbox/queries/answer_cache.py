"""A cache of model answers. Identical questions asked at the same time share one request.

A question is a model, its settings, the messages and the request's options. The cache does not keep failures.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from ..errors import QueryError

if TYPE_CHECKING:
    from .session import Answer


class AnswerStore(Protocol):
    """Storage of answers. Its methods must return at once and must not raise."""

    def find_answer(self, key: str) -> str | None:
        """Return the answer to the question with this key, or None."""

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Store an answer from the model with this name."""


class MemoryAnswers:
    """An answer store in memory."""

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}

    def find_answer(self, key: str) -> str | None:
        return self._answers.get(key)

    def add_answer(self, key: str, model: str, text: str) -> None:
        self._answers[key] = text


def build_key(fingerprint: dict[str, Any], messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return a hash of a model's fingerprint, the messages and the options."""
    parts: dict[str, Any] = {"model": fingerprint, "messages": messages}
    if options:  # Without options, a key is equal to that of version 1.0.
        parts["options"] = options
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerCache:
    """A cache in front of a model: it answers from a store and asks the model only for missing answers.

    A caller waits while another caller asks the same question. If the model fails, all waiting callers get its
    QueryError. If the asking caller is cancelled, or its own budget or deadline ends, the next caller asks. Use one
    cache on one event loop only.

    Args:
        store: Storage of the answers.
        execution: An execution's key, if only its later attempts use the answers. A question that one attempt asks
            twice then has two answers. None if all executions share the answers.
    """

    def __init__(self, store: AnswerStore, execution: str | None = None) -> None:
        self._store = store
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # held while the question with this key is asked
        self._failures: dict[str, QueryError] = {}  # the last failure of each question, for callers that wait for it
        self.execution = execution
        self._counts = Counter[str]()  # number of times that an execution asked each question
        self.hits = 0  # questions answered without a request

    async def get_answer(self, key: str, model: str, ask: Callable[[], Awaitable["Answer"]]) -> "Answer | str":
        """Return the text of the stored answer for this key. If there is none, call `ask` and store its answer.

        `model` is the model's name, for records. Raises the errors of `ask`.
        """
        if self.execution is not None:
            key = self._number_question(key)
        lock = self._locks.setdefault(key, asyncio.Lock())
        has_waited = lock.locked()
        async with lock:
            text = self._store.find_answer(key)
            if text is not None:
                self.hits += 1
                return text
            failure = self._failures.get(key)
            if has_waited and failure is not None:  # This caller waited for the one that failed.
                raise type(failure)(str(failure))
            self._failures.pop(key, None)
            try:
                answer = await ask()
            except QueryError as error:
                self._failures[key] = error
                raise
            self._store.add_answer(key, model, answer.text)
            return answer

    def _number_question(self, key: str) -> str:
        """Return a key that contains how many times the execution has asked the question."""
        self._counts[key] += 1
        return hashlib.sha256(f"{self.execution} {key} {self._counts[key]}".encode()).hexdigest()
