"""A cache of model answers. Identical questions asked at the same time share one request.

A question is a model, its settings, the messages and the request's options. The cache does not keep failures.
"""

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from ..errors import QueryError

if TYPE_CHECKING:
    from .session import Answer


# Sentences in a recursive model's messages that say how much is left. They are not part of its question, which another
# run with other limits asks again.
LIMITS = re.compile(
    r"You have \d+ turns(, and at most \d+ calls of models in all, your own turns included)?\."
    r"( The code of a turn may run for \S+ s, without waits for queries and tools\.)?"
    r"|Turns left: \d+\."
)


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


def remove_limits(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a recursive model's messages without the sentences about its limits."""
    return [{**message, "content": LIMITS.sub("", message["content"])} for message in messages]


class AnswerCache:
    """A cache in front of a model: it answers from a store and asks the model only for missing answers.

    A caller waits while another caller asks the same question. If the model fails, all waiting callers get its
    QueryError. If the asking caller is cancelled, or its own budget or deadline ends, the next caller asks. Use one
    cache on one event loop only.

    Args:
        store: Storage of the answers.
        execution: An execution's key, if only its later attempts use the answers. A question that one attempt asks
            twice then has two answers. None if all executions share the answers.
        has_limits_in_keys: True for a ledger whose keys contain the sentences about limits, as in version 1.0.
    """

    def __init__(self, store: AnswerStore, execution: str | None = None, *, has_limits_in_keys: bool = False) -> None:
        self._store = store
        self.has_limits_in_keys = has_limits_in_keys
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
            key = self._number_question(key, self._counts)
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

    def list_missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the questions that would need a request if they were asked now, in this order."""
        counts = self._counts.copy()
        if self.execution is not None:
            keys = [self._number_question(key, counts) for key in keys]
        firsts = {key: index for index, key in reversed(list(enumerate(keys)))}  # Equal questions share a request.
        return [index for key, index in firsts.items() if self._store.find_answer(key) is None]

    def _number_question(self, key: str, counts: Counter[str]) -> str:
        """Return a key that contains how many times the execution has asked the question."""
        counts[key] += 1
        return hashlib.sha256(f"{self.execution} {key} {counts[key]}".encode()).hexdigest()
