"""What an execution may ask: a language model, with the limits on its queries."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...sandbox.budget import Budget
from ...sandbox.errors import ConfigurationError
from ...sandbox.queries import Queries, Query, QueryContext, QuerySession, RunTracked, run_untracked
from .block import LanguageModel, resolve_model
from .litellm_client import EXTRA, offline

if TYPE_CHECKING:
    from ...sandbox.interpreter import Interpreter
    from ...sandbox.queries import Model


@dataclass(kw_only=True)
class Asking:
    """A model, and what the queries of each top-level execution may use up.

    `batch_concurrency` requests may be under way at once (4, which servers for one person take well), recursive
    queries may be `max_depth` deep (2: a recursive model that asks another), and `max_llm_calls` calls of the model
    may be made (50), its own turns in recursive queries included, with `max_llm_tokens` tokens together. `spent` is the
    budget of all executions together. Raises ConfigurationError.
    """

    model: LanguageModel
    batch_concurrency: int = 4
    max_depth: int = 2
    max_llm_calls: int | None = 50
    max_llm_tokens: int | None = None
    spent: Budget = field(default_factory=Budget)
    track: RunTracked = run_untracked

    def __post_init__(self) -> None:
        for name, least in (("batch_concurrency", 1), ("max_depth", 0), ("max_llm_calls", 0), ("max_llm_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}: it is {least} or more")

    @cached_property
    def _models(self) -> tuple[Model, Model]:
        return self.model.root(), self.model.flat()

    def queries(self, interpreter: Interpreter, *, depth: int = 0) -> Queries:
        """The queries of one execution, whose code is at that depth, in the interpreter's sandbox."""
        root, flat = self._models
        tree = QuerySession(
            root=root,
            flat=flat,
            budget=Budget(calls=self.max_llm_calls, tokens=self.max_llm_tokens, parent=self.spent),
            concurrency=self.batch_concurrency,
            max_depth=self.max_depth,
            recurse=recurse,
            track=self.track,
        )
        return Queries(tree, interpreter, depth=depth)


async def asking(
    model: LanguageModel | str, *, max_cost: float | None = None, track: RunTracked = run_untracked, **limits: Any
) -> Asking:
    """What executions may ask of that model, for `max_cost` US dollars together. Raises ConfigurationError.

    `limits` are the fields of `Asking`. A saved block is looked up where a Prefect server is configured, and none is
    started for it.
    """
    if max_cost is not None and max_cost < 0:
        raise ConfigurationError(f"max_cost is {max_cost}: it is a number of US dollars, or None for no limit")
    found = await resolve_model(model) if isinstance(model, str) else model
    spent = Budget(cost=max_cost)
    asked = Asking(model=found, spent=spent, track=track, **limits)
    await found.check(priced=max_cost is not None or asked.max_llm_tokens is not None)
    return asked


async def recurse(queries: Queries, prompt: str, given: QueryContext, query: Query) -> str:
    """Answers a recursive query; see `recursive_model.answer`. DSPy is imported for the first, in a thread."""
    model = await asyncio.to_thread(_recursive_model)
    return await model.answer(queries, prompt, given, query)


def _recursive_model() -> Any:
    offline()
    try:
        return importlib.import_module(".recursive_model", __package__)
    except ImportError as error:
        raise ConfigurationError(EXTRA) from error
