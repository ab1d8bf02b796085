"""An execution's access to a language model, with the limits on its queries."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.interpreter import Interpreter
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Budget
from ...sandbox.queries.records import OnEvent, Transcript
from ...sandbox.queries.recursion import Queries
from ...sandbox.queries.recursive_model import DEFAULT_RECURSION, RecursionSettings, answer
from ...sandbox.queries.session import (
    Model,
    QuerySession,
    RunTracked,
    estimate_for_budget,
    run_untracked,
)
from ...sandbox.queries.shared_budget import SharedBudget
from ..registry import SLUG_PREFIX
from ..worker_consent import check_path
from .settings import LanguageModelSettings

NamedModels = Mapping[str, LanguageModelSettings | str] | Sequence[str]

SLUG = "rlm-language-model"
# Names of the options that `open_model_access` takes.
LIMITS = (
    *("sub_model", "models", "batch_concurrency", "max_depth", "max_llm_calls", "max_llm_tokens"),
    *("max_total_llm_calls", "max_total_llm_tokens", "max_cost", "budget"),
)
_models: dict[str, LanguageModelSettings] = {}  # unsaved models of this process, by the texts of `name_model`


@dataclass(kw_only=True)
class ModelAccess:
    """A model, and the limits on the queries of each top-level execution."""

    model: LanguageModelSettings
    sub_model: LanguageModelSettings | None = None  # the model of flat queries; None: that of `model`
    # The models that code may choose, by name.
    models: Mapping[str, LanguageModelSettings] = field(default_factory=dict[str, LanguageModelSettings])
    batch_concurrency: int = 4  # requests at the same time; this suits a server that only one person uses
    max_depth: int = 2  # This allows a recursive model to ask another one.
    max_llm_calls: int | None = 50  # includes a model's turns in recursive queries
    max_llm_tokens: int | None = None
    spent: Budget = field(default_factory=Budget)  # the budget of all executions together
    track: RunTracked = run_untracked
    wrap_model: Callable[[Model], Model] = lambda model: model
    cache: AnswerCache | None = None
    recursion: RecursionSettings = DEFAULT_RECURSION

    def __post_init__(self) -> None:
        self._root_model = self.model.make_root_model()
        self._flat_model = self.model.make_flat_model()
        if self.sub_model is not None:
            self._flat_model = self.sub_model.make_root_model()
        self._named_models = {name: settings.make_root_model() for name, settings in self.models.items()}

    def list_settings(self) -> list[LanguageModelSettings]:
        """Return the settings of all models."""
        sub_models = [] if self.sub_model is None else [self.sub_model]
        return [self.model, *sub_models, *self.models.values()]

    async def check_models(self, *, is_recursive: bool = False) -> None:
        """Raise ConfigurationError if a model's settings are wrong, or `max_depth` forbids a recursive query."""
        if is_recursive and self.max_depth == 0:
            raise ConfigurationError("`max_depth` is 0, and a recursive query needs 1: raise it")
        for model in (self._root_model, self._flat_model, *self._named_models.values()):
            await model.check()

    async def check_estimates(self) -> None:
        """Raise ConfigurationError if a limit needs an unknown price or an unknown length of answers."""
        for model in (self._root_model, self._flat_model, *self._named_models.values()):
            await estimate_for_budget(self.spent, model, [])

    def fingerprint(self) -> dict[str, Any]:
        """Return, as JSON and without secrets, the settings of all models that answers depend on."""
        fingerprint = self.model.fingerprint()
        if self.sub_model is not None:
            fingerprint["sub_model"] = self.sub_model.fingerprint()
        if self.models:
            fingerprint["models"] = {name: settings.fingerprint() for name, settings in self.models.items()}
        return fingerprint

    def queries(
        self,
        interpreter: Interpreter,
        *,
        depth: int = 0,
        index: int = 0,
        on_event: OnEvent | None = None,
        cache: AnswerCache | None = None,
        transcript: Transcript | None = None,
    ) -> Queries:
        """Return the queries for execution number `index`, whose code runs at `depth` in the interpreter's sandbox."""
        session = QuerySession(
            root_model=self.wrap_model(self._root_model),
            flat_model=self.wrap_model(self._flat_model),
            models={name: self.wrap_model(model) for name, model in self._named_models.items()},
            budget=Budget(calls=self.max_llm_calls, tokens=self.max_llm_tokens, parent=self.spent),
            concurrency=self.batch_concurrency,
            track=self.track,
            cache=self.cache if cache is None else cache,
            on_event=on_event,
            transcript=transcript,
            index=index,
        )
        recurse = partial(answer, interpreter, self.recursion)
        return Queries(session, recurse, max_depth=self.max_depth, depth=depth, numbers=(index,))


async def open_model_access(
    model: LanguageModelSettings | str,
    *,
    sub_model: LanguageModelSettings | str | None = None,
    models: NamedModels | None = None,
    max_total_llm_calls: int | None = None,
    max_total_llm_tokens: int | None = None,
    max_cost: float | None = None,
    budget: str | os.PathLike[str] | None = None,
    **others: Any,
) -> ModelAccess:
    """Return access to a model for executions.

    Args:
        model: The settings, name or saved block of the model.
        sub_model: The model of flat queries. If it is the name of a model and not of a saved block, it has the address
            and the key of `model`. Default None: that of `model`.
        models: The models that code may choose: a dict by name, or a list of names.
        max_total_llm_calls: Limit on the calls of all executions. Default None: no limit.
        max_total_llm_tokens: Limit on the tokens of all executions. Default None: no limit.
        max_cost: Limit on the US dollars of all executions. Default None: no limit.
        budget: A `Budget` or its path, which also others use. Default None: no such budget.
        **others: Further fields of `ModelAccess`.

    Raises:
        ConfigurationError: A limit or a model is wrong, or the price that a limit needs is unknown.
    """
    totals = {"max_total_llm_calls": max_total_llm_calls, "max_total_llm_tokens": max_total_llm_tokens}
    for name, value in {**others, **totals, "max_cost": max_cost}.items():
        minimum = 1 if name == "batch_concurrency" else 0
        if isinstance(value, (int, float)) and value < minimum:
            raise ConfigurationError(f"`{name}` is {value!r}: use {minimum} or more")
    settings = await resolve_language_model(model)
    sub_settings = None
    if isinstance(sub_model, str) and not is_saved_model(sub_model) and sub_model not in _models:
        settings = settings.model_copy(update={"sub_model": sub_model})
    elif sub_model is not None:
        sub_settings = await resolve_language_model(sub_model)
    if isinstance(models, str):
        models = [models]
    sources = models if isinstance(models, Mapping) else {name: name for name in models or ()}
    named = {name: await resolve_language_model(source) for name, source in sources.items()}
    shared = None if budget is None else SharedBudget(check_path(Path(budget).expanduser().absolute()))
    spent = Budget(calls=max_total_llm_calls, tokens=max_total_llm_tokens, cost=max_cost, parent=shared, is_total=True)
    access = ModelAccess(model=settings, sub_model=sub_settings, models=named, spent=spent, **others)
    await access.check_estimates()
    return access


def name_model(model: LanguageModelSettings) -> str:
    """Return the name of a model for a flow's parameter. A model that is not saved gets a name in this process."""
    saved = getattr(model, "_block_document_name", None)
    if saved is not None:
        return f"{SLUG}/{saved}"
    name = f"<{model.model} {id(model):#x} of this process>"
    _models[name] = model
    return name


def is_saved_model(text: str) -> bool:
    """Return True if a flow's parameter names a block on the Prefect server and not a model."""
    return text.partition("/")[0] in (SLUG, SLUG.removeprefix(SLUG_PREFIX))


async def resolve_language_model(source: LanguageModelSettings | str) -> LanguageModelSettings:
    """Return a model's settings. A text names a saved block, a model of this process, or a model of LiteLLM.

    Raises ConfigurationError if no Prefect server is configured, or the block does not exist.
    """
    if not isinstance(source, str):
        return source
    if source in _models:
        return _models[source]
    if not is_saved_model(source):
        return LanguageModelSettings(model=source)
    from ..saved_blocks import has_prefect_server, load_saved_block
    from .block import LanguageModel

    if not has_prefect_server():
        raise ConfigurationError(f"{source!r} is a block on a Prefect server: set PREFECT_API_URL")
    return await load_saved_block(LanguageModel, source)
