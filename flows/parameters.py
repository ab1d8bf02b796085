"""The parameters that flows share, each once: type, default, bounds, and the description that the UI's form shows.

A flow takes them as `**parameters: Unpack[SharedParameters]`; `signature_of` expands that to the signature that Prefect
and callers see, and `Options` is what the engine is handed. The command line and docs/reference.md are checked against
this file. Nothing here imports Prefect: the command line reads it before anything slow is imported.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from ..sandbox.driver_settings import PREPARE_TIMEOUT_SECONDS, Preparation
from ..sandbox.intake.collected_files import check_patterns
from .inputs.conversion import PathText, ProviderText, ToolsByName

# Task runs of one flow run, at most: a server records some fifty a second, and 250 with the settings that we ship.
MAX_TASK_RUNS = 1000

Provider = Annotated[
    ProviderText,
    Field(
        "local",
        min_length=1,
        description="local, container, daytona, modal, local:none (no isolation), or a saved block such as "
        "daytona-sandbox/NAME",
    ),
]
ProviderOptions = Annotated[
    dict[str, Any] | None,
    Field(
        None,
        description="Settings of the provider for this run, by the names of its block's fields, such as packages or "
        "memory_mib",
    ),
]
PythonPath = Annotated[
    list[str] | None,
    Field(None, description="Directories of one's own modules, which code imports from first"),
]
Mounts = Annotated[
    dict[str, PathText] | None,
    Field(
        None,
        description="Files and directories of the host that code reads, by the absolute paths at which it has them",
    ),
]
Types = Annotated[
    dict[str, Literal["int", "float", "bool", "json", "str"]] | Literal["json"] | None,
    Field(
        None,
        description="Types of a CSV file's columns (int, float, bool, json or str) where they are not to be found from "
        "the cells; or json, and each cell is read by itself",
    ),
]
VolumeName = Annotated[
    str | None, Field(None, description="The volume that every sandbox has; by default the provider's own, if any")
]
MaxWorkers = Annotated[int, Field(4, ge=1, description="Executions at one time, each in a sandbox of its own")]
Timeout = Annotated[float, Field(120, gt=0, description="Seconds for each execution")]
Retries = Annotated[int, Field(2, ge=0, description="How often an execution whose sandbox failed is tried again")]
RetryCodeErrors = Annotated[bool, Field(False, description="Try again also when the code itself failed or timed out")]
Idempotent = Annotated[
    bool, Field(False, description="Try again also when a sandbox was lost while the code may have run")
]
OnFailure = Annotated[
    Literal["raise", "return"],
    Field("raise", description="Fail the flow run when executions failed, or return the failures"),
]
MaxFailures = Annotated[
    float | None,
    Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Failed executions, or below 1 a share of all, after which no more are begun",
    ),
]
Deadline = Annotated[float | None, Field(None, gt=0, description="Seconds for the whole flow run")]
ReuseSandboxes = Annotated[
    bool, Field(False, description="Keep a worker's sandbox; each execution still has its own process")
]
Prepare = Annotated[
    str | None,
    Field(
        None,
        description="Code that runs once in each sandbox; each execution is a fork of its process, with its names",
    ),
]
PrepareTimeout = Annotated[float, Field(PREPARE_TIMEOUT_SECONDS, gt=0, description="Seconds for prepare")]
PrepareSeed = Annotated[
    int | None,
    Field(
        None,
        description="What the random generators of prepared executions start from, with the number of each; by default "
        "the operating system seeds them",
    ),
]
ExecutionsPerTask = Annotated[
    int | None, Field(None, ge=1, description="Executions in one task run; by itself about 1,000 runs")
]
CacheResults = Annotated[bool, Field(False, description="Take results of identical executions of earlier flow runs")]
ResultsPath = Annotated[
    PathText | None,
    Field(None, description="The ledger's directory or location; by default one below the results root"),
]
Shards = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    Field(None, description="Flow runs on the workers that the executions are shared out to, or auto; by default none"),
]
LogOutput = Annotated[
    bool,
    Field(True, description="What the code writes is in its task run's log as it comes, 200 lines of each execution"),
]
LanguageModelName = Annotated[
    str | None,
    Field(
        None,
        description="What the code may ask: a model in LiteLLM's naming, or a saved block such as language-model/NAME",
    ),
]
BatchConcurrency = Annotated[int, Field(4, ge=1, description="Requests to the model at one time, for each execution")]
MaxDepth = Annotated[int, Field(2, ge=0, description="How deep recursive queries may go; plain code is at depth 0")]
MaxLlmCalls = Annotated[int | None, Field(50, ge=0, description="Calls of the model, for each execution")]
MaxLlmTokens = Annotated[int | None, Field(None, ge=0, description="Tokens of prompts and answers, for each execution")]
MaxCost = Annotated[float | None, Field(None, ge=0, description="US dollars for the model, for the whole flow run")]
CacheQueries = Annotated[
    bool,
    Field(False, description="Ask the model each question once, and take answers that ledgers have from earlier runs"),
]


Tools = Annotated[
    ToolsByName | None,
    Field(
        None,
        description="Functions of the host that code may call, by the names that they have there: import paths such as "
        "package.module:function",
    ),
]


Collect = Annotated[
    list[str] | None,
    Field(
        None,
        description="Files of the working folder that come home once an execution has ended, by patterns such as *.png "
        "or out/**",
    ),
]


class _CommonParameters(TypedDict, total=False):
    provider: Provider
    provider_options: ProviderOptions
    python_path: PythonPath
    mounts: Mounts
    timeout: Timeout
    retries: Retries
    deadline: Deadline
    results_path: ResultsPath
    log_output: LogOutput
    batch_concurrency: BatchConcurrency
    max_depth: MaxDepth
    max_llm_calls: MaxLlmCalls
    max_llm_tokens: MaxLlmTokens
    max_cost: MaxCost
    cache_queries: CacheQueries


class RlmParameters(_CommonParameters, total=False):
    """What rlm shares with other flows; its language model is a parameter of its own."""

    timeout: Annotated[float, Field(600, gt=0, description="Seconds for each execution")]  # a conversation takes longer
    on_failure: OnFailure
    cache_results: CacheResults


class SequenceParameters(_CommonParameters, total=False):
    """What sequence shares with other flows: not the workers, reuse and caching, as its steps build on each other."""

    retry_code_errors: RetryCodeErrors
    idempotent: Idempotent
    on_failure: OnFailure
    language_model: LanguageModelName
    prepare: Prepare
    prepare_timeout: PrepareTimeout
    prepare_seed: PrepareSeed
    tools: Tools
    collect: Collect


class SharedParameters(SequenceParameters, total=False):
    """What batch, sweep and chunks share."""

    max_workers: MaxWorkers
    max_failures: MaxFailures
    reuse_sandboxes: ReuseSandboxes
    executions_per_task: ExecutionsPerTask
    cache_results: CacheResults
    shards: Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The shared parameters of one flow run, all of them: what the engine is handed, and a shard's flow as JSON.

    Their order here, by groups, is that of every flow's signature, and so of the UI's form.
    """

    # What runs, and where.
    provider: Provider
    provider_options: ProviderOptions = None
    python_path: PythonPath = None
    mounts: Mounts = None
    prepare: Prepare = None
    prepare_timeout: PrepareTimeout = PREPARE_TIMEOUT_SECONDS
    prepare_seed: PrepareSeed = None
    tools: Tools = None
    # How much at once, and for how long.
    max_workers: MaxWorkers
    timeout: Timeout
    deadline: Deadline
    reuse_sandboxes: ReuseSandboxes
    executions_per_task: ExecutionsPerTask
    shards: Shards = None  # a shard is cut no further
    # What a failure does.
    retries: Retries
    retry_code_errors: RetryCodeErrors
    idempotent: Idempotent
    on_failure: OnFailure
    max_failures: MaxFailures = None
    # Results.
    results_path: ResultsPath
    cache_results: CacheResults
    collect: Collect = None
    log_output: LogOutput
    # The language model.
    language_model: LanguageModelName
    batch_concurrency: BatchConcurrency
    max_depth: MaxDepth
    max_llm_calls: MaxLlmCalls
    max_llm_tokens: MaxLlmTokens
    max_cost: MaxCost
    cache_queries: CacheQueries = False

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], **fixed: Any) -> Self:
        """The options of a flow that was given these parameters, and for which those in `fixed` are settled.

        Raises ConfigurationError for parameters that do not go together.
        """
        defaults = {name: _default_of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
        options = cls(**{**defaults, **parameters, **fixed})
        check_patterns(options.collect)
        if options.python_path is not None:  # for a shard, which runs in another directory
            options = replace(options, python_path=[_make_absolute(path) for path in options.python_path])
        if options.mounts is not None:
            absolute = {target: _make_absolute(source) for target, source in options.mounts.items()}
            options = replace(options, mounts=dict(absolute))
        return replace(options, reuse_sandboxes=options.reuse_sandboxes or options.build_preparation() is not None)

    def build_preparation(self) -> Preparation | None:
        """The code that is to run in each sandbox first, None without any. Raises ConfigurationError."""
        return Preparation.from_parameters(self.prepare, self.prepare_timeout, self.prepare_seed)


def field_of(hint: Any) -> FieldInfo | None:
    """The default, bounds and description that an annotation carries; None where it carries none."""
    return next((item for item in get_args(hint) if isinstance(item, FieldInfo)), None)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The function's signature with its shared parameters written out, each with its default, in the place of `**`."""
    hints = get_type_hints(function, include_extras=True)
    order = [item.name for item in fields(Options)]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter.replace(annotation=hint))
            continue
        shared_hints = get_type_hints(*get_args(hint), include_extras=True)
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(hint), annotation=hint)
            for name, hint in sorted(shared_hints.items(), key=lambda item: order.index(item[0]))
        ]
    return inspect.Signature(parameters, return_annotation=hints.get("return", inspect.Signature.empty))


def _make_absolute(path: PathText) -> str:
    return str(Path(os.path.expanduser(path)).absolute())


def _default_of(hint: Any) -> Any:
    field = field_of(hint)
    return ... if field is None else field.default
