"""What queries need of a language model: an answer with its usage, and an estimate before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .budget import Usage

Message = dict[str, str]  # role and content, as in OpenAI's chat API


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
