"""An execution's access to a language model, with the limits on its queries."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from ...sandbox.caller import name_parameter
from ...sandbox.errors import BudgetExceeded, ConfigurationError
from ...sandbox.interpreter import Interpreter
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Budget
from ...sandbox.queries.events import OnEvent
from ...sandbox.queries.recursion import Queries
from ...sandbox.queries.recursive_model import DEFAULT_RECURSION, RecursionSettings, answer
from ...sandbox.queries.session import (
    Model,
    QuerySession,
    RunTracked,
    estimate_for_budget,
    run_untracked,
)
from ...sandbox.queries.transcript import Transcript
from .litellm_client import LiteLLMModel
from .settings import LanguageModelSettings

NamedModels = Mapping[str, LanguageModelSettings | str] | Sequence[str]

SLUG = "language-model"
LIMITS = (
    "sub_model",
    "models",
    "batch_concurrency",
    "max_depth",
    "max_llm_calls",
    "max_llm_tokens",
    "max_total_llm_calls",
    "max_total_llm_tokens",
    "max_cost",
)  # names of the options that `open_model_access` takes
_models: dict[str, LanguageModelSettings] = {}  # unsaved models of this process, by their names in parameters


@dataclass(kw_only=True)
class ModelAccess:
    """A model, and the limits on the queries of each top-level execution.

    Args:
        model: The model's settings.
        sub_model: The model for flat queries; None for that of `model`.
        models: Blocks whose models code may choose in a query, by name.
        batch_concurrency: Requests at the same time. 4 suits a server that only one person uses.
        max_depth: Depth of recursive queries. 2 allows a recursive model to ask another one.
        max_llm_calls: Calls of the model, including its turns in recursive queries; None for no limit.
        max_llm_tokens: Tokens of all calls together; None for no limit.
        spent: The budget of all executions together.
        track: Runs and records each query.
        wrap_model: Wraps the models before they are asked.
        cache: Answers to earlier questions. A cached question is not asked again.
        recursion: Limits and instructions of recursive models.

    Raises:
        ConfigurationError: A limit is negative, or `batch_concurrency` is below 1.
    """

    model: LanguageModelSettings
    sub_model: LanguageModelSettings | None = None
    models: Mapping[str, LanguageModelSettings] = field(default_factory=dict[str, LanguageModelSettings])
    batch_concurrency: int = 4
    max_depth: int = 2
    max_llm_calls: int | None = 50
    max_llm_tokens: int | None = None
    spent: Budget = field(default_factory=Budget)
    track: RunTracked = run_untracked
    wrap_model: Callable[[Model], Model] | None = None
    cache: AnswerCache | None = None
    recursion: RecursionSettings = DEFAULT_RECURSION

    def __post_init__(self) -> None:
        for name, least in (("batch_concurrency", 1), ("max_depth", 0), ("max_llm_calls", 0), ("max_llm_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name_parameter(name)} is {value!r}: use {least} or more")
        flat = self.model.make_flat_model() if self.sub_model is None else self.sub_model.make_root_model()
        self._models = self.model.make_root_model(), flat
        self._named_models = {name: settings.make_root_model() for name, settings in self.models.items()}

    async def check_first_call(self, *, is_recursive: bool = False) -> None:
        """Raise ConfigurationError if a model's settings are wrong, or the limits forbid every call. Send no request.

        With `is_recursive`, only the limits for the model of recursive queries count.
        """
        if is_recursive and self.max_depth == 0:
            raise ConfigurationError(f"{name_parameter('max_depth')} is 0, and a recursive query needs 1: raise it")
        for model in self._list_models():
            await model.check()
        refusals: list[str] = []
        for model in self._models[:1] if is_recursive else self._models:
            budget = self._make_budget()
            most = await estimate_for_budget(budget, model, [])
            try:
                budget.check(most)
            except BudgetExceeded as error:
                refusals.append(f"the model {model.name} cannot be called: {error}")
            else:
                return
        raise ConfigurationError(refusals[0])

    async def check_estimates(self) -> None:
        """Raise ConfigurationError if a limit needs an unknown price or an unknown length of answers."""
        for model in self._list_models():
            await estimate_for_budget(self._make_budget(), model, [])

    def fingerprint(self) -> dict[str, Any]:
        """Return, as JSON and without secrets, the settings of all models that answers depend on."""
        named = {name: settings.fingerprint() for name, settings in self.models.items()}
        sub_model = {} if self.sub_model is None else {"sub_model": self.sub_model.fingerprint()}
        return {**self.model.fingerprint(), **sub_model, **({"models": named} if named else {})}

    def _list_models(self) -> Iterable[LiteLLMModel]:
        return (*self._models, *self._named_models.values())

    def _make_budget(self) -> Budget:
        """Return a budget for one execution."""
        return Budget(calls=self.max_llm_calls, tokens=self.max_llm_tokens, parent=self.spent)

    def count_cached(self) -> int:
        """Return how many questions of all executions the cache answered."""
        return 0 if self.cache is None else self.cache.hits

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
        """Return the queries for execution number `index`, whose code runs at `depth` in the interpreter's sandbox.

        `cache` has answers to the execution's questions; None for the answers to those of all executions.
        """
        wrap: Callable[[Model], Model] = self.wrap_model or (lambda model: model)
        root, flat = map(wrap, self._models)
        session = QuerySession(
            root_model=root,
            flat_model=flat,
            models={name: wrap(model) for name, model in self._named_models.items()},
            budget=self._make_budget(),
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
    track: RunTracked = run_untracked,
    **limits: Any,
) -> ModelAccess:
    """Return access to a model for executions.

    Args:
        model: A `LanguageModel`, the name of a saved one, or a model in LiteLLM's naming. A saved block needs a
            configured Prefect server; none is started.
        sub_model: The model for flat queries; None for that of `model`. The name of a model that is no saved block is
            asked at the address and with the key of `model`.
        models: Models that code may choose with `llm_query(..., model=NAME)`: a dict by name, whose values are like
            `model`, or a list of such names. Default: none.
        max_total_llm_calls: Calls of the model by all executions together; None for no limit.
        max_total_llm_tokens: Tokens of all these calls; None for no limit.
        max_cost: US dollars for all executions together; None for no limit.
        track: Runs and records each query.
        **limits: Other fields of `ModelAccess`.

    Raises:
        ConfigurationError: A limit or the model is invalid, or the price that a limit needs is unknown.
    """
    if max_cost is not None and max_cost < 0:
        raise ConfigurationError(
            f"{name_parameter('max_cost')} is {max_cost!r}: use a number of US dollars, or None for no limit"
        )
    totals = {"max_total_llm_calls": max_total_llm_calls, "max_total_llm_tokens": max_total_llm_tokens}
    for name, value in totals.items():
        if value is not None and value < 0:
            raise ConfigurationError(f"{name_parameter(name)} is {value!r}: use 0 or more, or None for no limit")
    settings = await _resolve(model, "language_model")
    if isinstance(sub_model, str):
        if is_saved_model(sub_model) or sub_model.startswith("<"):
            sub_model = await resolve_language_model(sub_model, "sub_model")
        else:
            settings, sub_model = settings.model_copy(update={"sub_model": sub_model}), None
    names = [models] if isinstance(models, str) else models or ()
    sources = names if isinstance(names, Mapping) else {name: name for name in names}
    spent = Budget(calls=max_total_llm_calls, tokens=max_total_llm_tokens, cost=max_cost, is_total=True)
    named = {name: await _resolve(source, "models") for name, source in sources.items()}
    access = ModelAccess(model=settings, sub_model=sub_model, models=named, spent=spent, track=track, **limits)
    await settings.check()
    await access.check_estimates()
    return access


def name_model(model: LanguageModelSettings) -> str:
    """Return the text of a flow's parameter for a model: the name of a saved block, or a name in this process."""
    saved = getattr(model, "_block_document_name", None)
    if saved is not None:
        return f"{SLUG}/{saved}"
    name = f"<{model.model} {id(model):#x} of this process>"
    _models[name] = model
    return name


def is_saved_model(text: str) -> bool:
    """Return whether a flow's parameter names a block on the Prefect server and not a model."""
    return text.partition("/")[0] == SLUG


async def _resolve(source: LanguageModelSettings | str, parameter: str) -> LanguageModelSettings:
    return await resolve_language_model(source, parameter) if isinstance(source, str) else source


async def resolve_language_model(text: str, parameter: str = "language_model") -> LanguageModelSettings:
    """Return the settings of the language model that a flow's `parameter` names.

    `language-model/NAME` is a saved block, and `name_model` names models of this process. Any other text is a model in
    LiteLLM's naming, with the credentials that LiteLLM finds in the environment.

    Raises:
        ConfigurationError: No Prefect server is configured, the block does not exist, or the text is empty.
    """
    if text in _models:
        return _models[text]
    if text.startswith("<"):
        raise ConfigurationError(
            f"{name_parameter('language_model')} is {text}, an object of another process: save it as a block, and pass "
            f"{SLUG}/NAME"
        )
    if is_saved_model(text):
        name = text.partition("/")[2]
        from prefect.context import AsyncClientContext, FlowRunContext
        from prefect.settings import PREFECT_API_URL

        from .block import LanguageModel

        if not (FlowRunContext.get() or AsyncClientContext.get() or PREFECT_API_URL.value()):
            raise ConfigurationError(f"{text!r} is a block on a Prefect server: set PREFECT_API_URL")
        try:
            return await LanguageModel.aload(name)  # type: ignore[return-value]
        except ValueError as error:
            raise ConfigurationError(
                f"this Prefect server has no block {text}: save it in the UI or with .save({name!r})"
            ) from error
    try:
        return LanguageModelSettings(model=text)
    except ValidationError as error:
        raise ConfigurationError(
            f"{name_parameter(parameter)} is {text!r}: use a model in LiteLLM's naming, such as "
            f"openai/gpt-4o-mini, or a saved block such as {SLUG}/NAME"
        ) from error
