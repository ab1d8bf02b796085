"""Interpreters for scripts without a flow: one class per provider, with its block's fields as keywords."""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from ..sandbox.driver_settings import PREPARE_TIMEOUT_SECONDS, Preparation
from ..sandbox.errors import ConfigurationError
from ..sandbox.queries.answer_cache import AnswerCache, MemoryAnswers
from ..sandbox.sessions.async_interpreter import AsyncInterpreter
from ..sandbox.sync_interpreter import SyncInterpreter
from .language_model.model_access import LIMITS, ModelAccess, open_model_access
from .problems import describe_problems
from .registry import PROVIDERS, ProviderEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..sandbox.interpreter import Interpreter
    from ..sandbox.queries.records import OnEvent, RlmEvent
    from ..sandbox.queries.recursion import Queries
    from ..sandbox.sandbox_api import Sandbox
    from .language_model.settings import LanguageModelSettings
    from .provider import SandboxProvider

DEFAULT_BLOCK_NAME = "default"  # The saved block to use if the settings and the environment lack credentials.


class ProviderSandboxes:
    """The base of an interpreter of one provider: opens its sandboxes. `entry` names the provider.

    Args:
        timeout: Seconds for each execution; None for no limit. Default: 120.
        tools: Functions of the host that code may call by name. Default: none.
        language_model: The model that code may query: a `LanguageModel`, the name of a saved one, or a model in
            LiteLLM's naming. Default: none.
        models: Models that code may choose with `llm_query(prompt, model=NAME)`: a dict by name, whose values are like
            `language_model`, or a list of such names. Default: none.
        batch_concurrency: Parallel model requests per execution. Default: 4.
        max_depth: Greatest depth of recursive queries. Code is at depth 0. Default: 2.
        max_llm_calls: Model calls per execution; None for no limit. Default: 50.
        max_llm_tokens: Model tokens per execution. Default: no limit.
        max_total_llm_calls: Model calls of all executions together. Default: no limit.
        max_total_llm_tokens: Model tokens of all executions together. Default: no limit.
        max_cost: US dollars for all executions together. Default: no limit.
        budget: A `Budget`, or its path, that others use too. Default: none.
        cache_queries: Ask the same question (model, its settings, messages) only once while the interpreter exists.
            Answers from the cache are not calls and cost nothing. Default: False.
        prepare: Code that runs once when the sandbox is open. The executions run in a fork of the process that ran it.
            Default: none.
        prepare_timeout: Seconds for `prepare`; None for no limit. Default: 300.
        prepare_seed: The seed of the random generators in `prepare`; by default the operating system seeds them.
        python_path: Directories of this machine that code imports modules from, read when the interpreter is created.
            Default: none.
        mounts: Files and directories of this machine, by the absolute paths at which code reads them. Default: none.
        on_turn: Function to call when a turn of a recursive model ends, with the turn's `RlmEvent`. It runs on the
            event loop and blocks it. If it raises an exception, the execution ends with it. Default: none.
        **others: The fields of the provider's block.

    Raises:
        ConfigurationError: A keyword is unknown or has a wrong value.
    """

    entry: ProviderEntry
    is_recursive: ClassVar[bool] = False  # True if only a recursive model asks

    def __init__(
        self,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        language_model: LanguageModelSettings | str | None = None,
        cache_queries: bool = False,
        prepare: str | None = None,
        prepare_timeout: float | None = PREPARE_TIMEOUT_SECONDS,
        prepare_seed: int | None = None,
        python_path: Sequence[str] | None = None,
        mounts: Mapping[str, str | os.PathLike[str]] | None = None,
        on_turn: OnEvent | None = None,
        **others: Any,
    ) -> None:
        self._limits = {name: others.pop(name) for name in LIMITS if name in others}
        self._limits["cache"] = AnswerCache(MemoryAnswers()) if cache_queries else None
        self._fields = others
        provider = _configure_provider(self.entry, others)
        has_files = python_path is not None or mounts is not None
        self._provider = provider.with_files(python_path, mounts) if has_files else provider
        if on_turn is not None and (not callable(on_turn) or inspect.iscoroutinefunction(on_turn)):
            raise ConfigurationError(
                "on_turn must be a plain function of a turn: in async code, put the turn into a queue"
            )
        self._on_turn = on_turn
        self._language_model = language_model
        self._model_access: ModelAccess | None = None
        make_queries = None if language_model is None else self._ask
        preparation = Preparation.from_parameters(prepare, prepare_timeout, prepare_seed)
        settings: Any = {"timeout": timeout, "tools": tools, "make_queries": make_queries, "prepare": preparation}
        # Each subclass also inherits from an interpreter class, whose `__init__` this calls.
        super().__init__(self._open_sandbox, **settings)  # type: ignore[reportCallIssue]

    def _ask(self, interpreter: Interpreter, depth: int) -> Queries:
        assert self._model_access is not None  # `_open_sandbox` sets it.
        return self._model_access.queries(interpreter, depth=depth, on_event=self._pass_turn)

    def _pass_turn(self, event: RlmEvent) -> None:
        if self._on_turn is not None and event.kind == "output":
            self._on_turn(event)

    async def _open_sandbox(self) -> Sandbox:
        provider = self._provider
        if self._language_model is not None and self._model_access is None:
            access = await open_model_access(self._language_model, **self._limits)
            await access.check_models(is_recursive=self.is_recursive)
            self._model_access = access
        saved = None if provider.has_credentials() else await self._load_default_block()
        if saved is not None:
            names = self.entry.load_provider().model_fields  # A block also has `credentials`.
            fields = {name: saved.get_account_setting(name) for name in names}
            configured = _configure_provider(self.entry, {**fields, **self._fields})
            provider = configured.with_files_of(provider)
            self._provider = provider
        return await provider.open_labelled()

    async def _load_default_block(self) -> Any:
        """Return the saved block, or None if it is missing. The provider's own error then says what is missing."""
        from .saved_blocks import has_prefect_server, load_saved_block

        if has_prefect_server():
            with suppress(ConfigurationError):
                return await load_saved_block(self.entry.load_block(), f"{self.entry.slug}/{DEFAULT_BLOCK_NAME}")
        return None


def _configure_provider(entry: ProviderEntry, fields: dict[str, Any]) -> SandboxProvider:
    provider = entry.load_provider()
    unknown = sorted(set(fields) - set(provider.model_fields))
    if unknown:
        known = ", ".join(provider.model_fields)
        raise ConfigurationError(f"{entry.block_name} has no field {unknown[0]}: it has {known}")
    try:
        return provider(**fields)
    except ValidationError as error:
        wrong = describe_problems(error, provider.list_secrets())
        raise ConfigurationError(f"{entry.block_name}: {wrong}") from None


class LocalInterpreter(ProviderSandboxes, SyncInterpreter):
    """An interpreter that runs code step by step in a sandbox on this machine.

    Its keywords include the fields of `LocalSandbox`, such as `isolation="landlock"` and `memory_mib=1024`.

    Example:
        >>> with LocalInterpreter(timeout=120) as interpreter:
        ...     print(interpreter.execute("SUBMIT(total=sum(range(1000)))").total)
        499500
    """

    entry = PROVIDERS["local"]


class AsyncLocalInterpreter(ProviderSandboxes, AsyncInterpreter):
    """The async form of `LocalInterpreter`, with the same methods and keywords, for one event loop.

    Example:
        >>> async with AsyncLocalInterpreter(timeout=120) as interpreter:
        ...     print((await interpreter.execute("SUBMIT(total=sum(range(1000)))")).total)
        499500
    """

    entry = PROVIDERS["local"]


class ContainerInterpreter(ProviderSandboxes, SyncInterpreter):
    """An interpreter that runs code step by step in a Docker or Podman container on this machine.

    Its keywords include the fields of `ContainerSandbox`, such as `image="docker.io/library/python:3.13-slim"`.
    """

    entry = PROVIDERS["container"]


class AsyncContainerInterpreter(ProviderSandboxes, AsyncInterpreter):
    """The async form of `ContainerInterpreter`, with the same methods and keywords, for one event loop."""

    entry = PROVIDERS["container"]


class ModalInterpreter(ProviderSandboxes, SyncInterpreter):
    """An interpreter that runs code step by step in a Modal sandbox.

    Its keywords include the fields of `ModalSandbox`, such as `volume_name="results"` and `gpu="T4"`.
    """

    entry = PROVIDERS["modal"]


class AsyncModalInterpreter(ProviderSandboxes, AsyncInterpreter):
    """The async form of `ModalInterpreter`, with the same methods and keywords, for one event loop."""

    entry = PROVIDERS["modal"]


class DaytonaInterpreter(ProviderSandboxes, SyncInterpreter):
    """An interpreter that runs code step by step in a Daytona sandbox.

    Its keywords include the fields of `DaytonaSandbox`, such as `repo_url`, `volume_name` and `snapshot`. The API key
    comes from `api_key`, else from DAYTONA_API_KEY, else, with PREFECT_API_URL set, from the saved block named
    `default`.

    Example:
        >>> with DaytonaInterpreter(timeout=120) as interpreter:
        ...     print(interpreter.execute("SUBMIT(total=sum(range(1000)))").total)
        499500
    """

    entry = PROVIDERS["daytona"]


class AsyncDaytonaInterpreter(ProviderSandboxes, AsyncInterpreter):
    """The async form of `DaytonaInterpreter`, with the same methods and keywords, for one event loop."""

    entry = PROVIDERS["daytona"]
