"""What an execution may ask: a language model, with the limits on its queries."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from ...sandbox.errors import BudgetExceeded, ConfigurationError
from ...sandbox.interpreter import Interpreter
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Budget
from ...sandbox.queries.recursion import Queries, QueryContext
from ...sandbox.queries.session import Model, Query, QuerySession, RunTracked, run_untracked
from .litellm_client import import_in_thread
from .settings import LanguageModelSettings

SLUG = "language-model"
LIMITS = ("batch_concurrency", "max_depth", "max_llm_calls", "max_llm_tokens", "max_cost")  # of `open_model_access`


@dataclass(kw_only=True)
class ModelAccess:
    """A model, and what the queries of each top-level execution may use up.

    `batch_concurrency` requests may be under way at once (4, which servers for one person take well), recursive
    queries may be `max_depth` deep (2: a recursive model that asks another), and `max_llm_calls` calls of the model
    may be made (50), its own turns in recursive queries included, with `max_llm_tokens` tokens together. `spent` is the
    budget of all executions together. What is asked goes through what `wrap_model` makes of a model, and questions that
    the `cache` has are not asked. Raises ConfigurationError.
    """

    model: LanguageModelSettings
    batch_concurrency: int = 4
    max_depth: int = 2
    max_llm_calls: int | None = 50
    max_llm_tokens: int | None = None
    spent: Budget = field(default_factory=Budget)
    track: RunTracked = run_untracked
    wrap_model: Callable[[Model], Model] | None = None
    cache: AnswerCache | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_concurrency", 1), ("max_depth", 0), ("max_llm_calls", 0), ("max_llm_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}: it is {least} or more")
        self._models = self.model.make_root_model(), self.model.make_flat_model()

    async def check_first_call(self, *, is_recursive: bool = False) -> None:
        """Raises ConfigurationError where it is sure that not one call of a model can be made.

        Where all that is asked `is_recursive`, the calls are those of the model for recursive queries. It asks nobody.
        """
        if is_recursive and self.max_depth == 0:
            raise ConfigurationError("max_depth is 0, and a recursive query runs at depth 1: raise it")
        for model in self._models:
            await model.check()
        refusals: list[str] = []
        for model in self._models[:1] if is_recursive else self._models:
            budget = self._make_budget()
            most = await model.estimate_max_usage([]) if budget.needs_estimates else (0, 0.0)
            try:
                budget.reserve(*most).release()
            except BudgetExceeded as error:
                refusals.append(f"no call of the model {model.name} can be made: {error}")
            else:
                return
        raise ConfigurationError(refusals[0])

    def _make_budget(self) -> Budget:
        """What one execution may use up."""
        return Budget(calls=self.max_llm_calls, tokens=self.max_llm_tokens, parent=self.spent)

    def count_cached(self) -> int:
        """How many questions of all executions were answered from the cache."""
        return 0 if self.cache is None else self.cache.hits

    def queries(self, interpreter: Interpreter, *, depth: int = 0, index: int = 0) -> Queries:
        """The queries of the execution with that number, whose code is at that depth, in the interpreter's sandbox."""
        root, flat = self._models if self.wrap_model is None else map(self.wrap_model, self._models)
        session = QuerySession(
            root_model=root,
            flat_model=flat,
            budget=self._make_budget(),
            concurrency=self.batch_concurrency,
            track=self.track,
            cache=self.cache,
        )
        return Queries(session, partial(recurse, interpreter), max_depth=self.max_depth, depth=depth, numbers=(index,))


async def open_model_access(
    model: LanguageModelSettings | str,
    *,
    max_cost: float | None = None,
    track: RunTracked = run_untracked,
    **limits: Any,
) -> ModelAccess:
    """What executions may ask of that model, for `max_cost` US dollars together. Raises ConfigurationError.

    `limits` are the fields of `ModelAccess`. A saved block is looked up where a Prefect server is configured, and none
    is started for it.
    """
    if max_cost is not None and max_cost < 0:
        raise ConfigurationError(f"max_cost is {max_cost}: it is a number of US dollars, or None for no limit")
    settings = await resolve_language_model(model) if isinstance(model, str) else model
    spent = Budget(cost=max_cost)
    access = ModelAccess(model=settings, spent=spent, track=track, **limits)
    await settings.check(priced=max_cost is not None or access.max_llm_tokens is not None)
    return access


def is_saved_model(text: str) -> bool:
    """Whether a flow's parameter names a block on the Prefect server rather than a model."""
    return text.partition("/")[0] == SLUG


async def resolve_language_model(text: str) -> LanguageModelSettings:
    """The language model that a flow's parameter names.

    `language-model/NAME` is a block that was saved under that name; anything else is a model in LiteLLM's naming, with
    the credentials that LiteLLM finds in the environment. Raises ConfigurationError.
    """
    if is_saved_model(text):
        name = text.partition("/")[2]
        from prefect.context import FlowRunContext

        from .block import LanguageModel

        if not (FlowRunContext.get() or os.environ.get("PREFECT_API_URL")):
            raise ConfigurationError(
                f"{text} is a block on a Prefect server, and none is configured: set PREFECT_API_URL"
            )
        try:
            return await LanguageModel.aload(name)  # type: ignore[return-value]
        except ValueError as error:
            raise ConfigurationError(
                f"there is no block {text} on this Prefect server: save it in the UI or with .save({name!r})"
            ) from error
    try:
        return LanguageModelSettings(model=text)
    except ValidationError as error:
        raise ConfigurationError(
            f"language_model is {text!r}: it is a model in LiteLLM's naming, such as openai/gpt-4o-mini, or a saved "
            f"block such as {SLUG}/NAME"
        ) from error


async def recurse(interpreter: Interpreter, queries: Queries, prompt: str, context: QueryContext, query: Query) -> str:
    """Answers a recursive query; see `dspy_rlm.answer`. DSPy is imported for the first, in a thread."""
    dspy_rlm = await import_in_thread(".dspy_rlm")
    return await dspy_rlm.answer(interpreter, queries, prompt, context, query)
