"""The parameters of the flows: types, defaults, bounds, descriptions, conversion and checks.

Each flow has one pydantic model of its parameters, which inherits the shared ones from here. Prefect's signature,
schema and form, the command line's options and the API reference are made from the model. Nothing here
imports Prefect, because the command line refuses wrong parameters before that slow import.
"""

import inspect
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    get_args,
    get_type_hints,
)

from pydantic import ConfigDict, Field, SecretStr, ValidationError
from pydantic.dataclasses import dataclass as parameter_model
from pydantic.fields import FieldInfo

from ..blocks.problems import describe_problems
from ..blocks.storage.location import PathOrLocation
from ..blocks.worker_consent import is_deployment_run
from ..sandbox.driver_settings import PREPARE_TIMEOUT_SECONDS, Preparation
from ..sandbox.errors import ConfigurationError
from ..tasks.host_tools import TOOL_TIMEOUT_SECONDS
from .inputs.conversion import (
    BudgetText,
    Code,
    Content,
    ModelsByName,
    ModelText,
    Mounts,
    PathText,
    PreparationCode,
    ProviderOptions,
    ProviderText,
    ToolsByName,
    convert_parameters,
    find_content,
)
from .inputs.host_paths import locate_ledger
from .inputs.readers import check_provided_variables
from .inputs.spilling import PARAMETER_LIMIT, read_spilled_parameters, read_text_reference
from .inputs.tables import ProgressReport

if TYPE_CHECKING:
    from .plan import Outcomes, Plan
    from .reports import Report

R = TypeVar("R")
L = TypeVar("L", PathOrLocation, PathOrLocation | None)

# The most task runs of one flow run. A server records about 50 a second, or 250 with the settings of rlm-batch.
MAX_TASK_RUNS = 1000


@dataclass(frozen=True, slots=True)
class CommandLineForm:
    """The form of a parameter on the command line, if it does not follow from the parameter's type.

    Args:
        form: A key of `READERS` in `cli/parameter_options.py`; by default the type decides.
        help: The help text, by default the beginning of the parameter's description.
        is_argument: The command takes the value without an option's name.
        metavar: The name of the value in the help, by default derived from the parameter.
    """

    form: str = "value"
    help: str = ""
    is_argument: bool = False
    metavar: str = ""


class FlowParameters(Generic[R]):
    """The parameters of one flow. They make its plan and its report. `R` is the type that the flow returns."""

    # Parameters of which exactly one is given.
    one_of: ClassVar[tuple[str, ...]] = ()
    # Parameters that need another one.
    needs: ClassVar[Mapping[str, str]] = {}
    # Pairs of parameters that exclude each other, and the reason.
    excludes: ClassVar[Mapping[tuple[str, str], str]] = {}
    # The name of the flow's function, module and command.
    flow_name: ClassVar[str]
    # The flow's name in Prefect. On a shared server, other flows may have a short name like `flow_name`.
    prefect_name: ClassVar[str]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Convert and check the parameters of one run. Raises ConfigurationError."""
        try:
            parameters = cls(**convert_parameters(read_spilled_parameters(values), find_contents(cls)))
        except ValidationError as error:
            raise ConfigurationError(describe_problems(error)) from None
        parameters._check_combination()
        return parameters

    def _check_combination(self) -> None:
        """Raise ConfigurationError if the given parameters break the rules of `one_of`, `needs` and `excludes`."""
        given: set[str] = set()
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            is_empty = value is None or value in ({}, "")
            if not is_empty and value != item.default:
                given.add(item.name)
        if self.one_of and len(given & {*self.one_of}) != 1:
            names = [f"`{name}`" for name in self.one_of]
            raise ConfigurationError(f"pass one of {', '.join(names[:-1])} or {names[-1]}, and only one")
        for name, other in {"models": "language_model", **self.needs}.items():
            if name in given and other not in given:
                raise ConfigurationError(f"`{name}` needs `{other}`: pass both, or leave `{name}` out")
        for (name, other), reason in self.excludes.items():
            if {name, other} <= given:
                raise ConfigurationError(f"`{name}` and `{other}` exclude each other: {reason}")

    @cached_property
    @abstractmethod
    def options(self) -> "Options":
        """The shared parameters, with fixed values for those that this flow does not have."""

    @abstractmethod
    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> "Plan":
        """Read the inputs, check all that can be checked before anything runs, and return the plan.

        Args:
            report: Called with lines about the reading of large files.
            run_ledger: The flow run's ledger, if the parameters name none.

        Raises:
            ConfigurationError: An input cannot be read, or a parameter is wrong.
        """

    @abstractmethod
    def build_report(self, outcomes: "Outcomes") -> "Report":
        """Return the report on the outcomes. Raises ConfigurationError if the outcomes lack the objective."""

    @cached_property
    def summary_code(self) -> str | None:
        """The code of `summarize`, or None. Raises ConfigurationError if it cannot be read or takes other variables."""
        summarize = getattr(self, "summarize", None)
        code = None if summarize is None else read_text_reference(summarize)
        check_provided_variables(code, ("results",), needs_all=self.options.preparation is None)
        return code

    def reads_blocks(self) -> bool:
        """Return whether a parameter names a location on a block, which only a Prefect server can resolve."""
        texts = [value for value in self.list_values().values() if isinstance(value, str)]
        return any(text.startswith(("block://", "@block://")) for text in texts)

    def list_values(self) -> dict[str, Any]:
        """Return the parameters by name, as JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


CacheResults = Annotated[bool, Field(description="Reuse results of identical executions of earlier runs.")]
Provider = Annotated[
    ProviderText,
    Field(
        min_length=1,
        description="Where to run: local, container, daytona, modal, or a saved block (rlm-daytona-sandbox/NAME). "
        "local:none runs code without isolation.",
    ),
]


@parameter_model(frozen=True, kw_only=True, config=ConfigDict(defer_build=True))
class RunParameters:
    """Parameters of every flow that opens sandboxes.

    Its subclasses inherit `defer_build`: pydantic builds the validator of a flow at its first run, and that of a base
    class never.
    """

    provider: Provider = "local"
    provider_options: Annotated[
        ProviderOptions,
        Field(
            description="Settings of the provider for this run, such as packages or memory_mib. The names are those of "
            "the block's fields."
        ),
    ] = field(default_factory=dict)
    secrets: Annotated[
        list[str] | None,
        Field(
            description="Names of environment variables of this process that the code sees. In what it prints or "
            "raises, [...] replaces their values, so no log, ledger or Prefect server has them, unless it submits or "
            "asks them. Deployments and shards refuse them."
        ),
        CommandLineForm(metavar="NAME"),
    ] = None
    python_path: Annotated[
        list[str] | None,
        Field(description="Directories of your own modules. Imports search them first."),
        CommandLineForm(metavar="DIR"),
    ] = None
    mounts: Annotated[
        Mounts,
        Field(
            description="Files and directories of the host that code can read. The names are absolute paths in the "
            "sandbox, and the values are paths on the host."
        ),
        CommandLineForm("mounts", "Host PATH to read at TARGET."),
    ] = field(default_factory=dict)
    timeout: Annotated[float, Field(gt=0, description="Seconds for each execution.")] = 120
    deadline: Annotated[
        float | None, Field(gt=0, description="Seconds for the whole flow run; no limit by default.")
    ] = None
    retries: Annotated[int, Field(ge=0, description="Retries after a sandbox failed.")] = 2
    results_path: Annotated[
        PathText | None,
        Field(description="Directory or location for results; by default a new one. New ones are in the results root."),
        CommandLineForm("path", metavar="PATH"),
    ] = None
    on_failure: Annotated[
        Literal["raise", "return"],
        Field(description="Fail the flow run if executions failed, or return the failures."),
    ] = "raise"

    fixed_options: ClassVar[dict[str, Any]] = {}

    @cached_property
    def options(self) -> "Options":
        """The shared parameters. The values of those that this flow lacks are in `fixed_options`, or the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(Options) if hasattr(self, field.name)}
        values |= self.fixed_options
        if values.get("prepare") is not None:
            values["reuse_sandboxes"] = True
        return Options(**values)


@parameter_model(frozen=True, kw_only=True)
class CommonParameters(RunParameters):
    """Parameters of every flow that executes code."""

    log_output: Annotated[
        bool,
        Field(
            description="Log the code's output. Prefect's log gets 200 lines of each execution and 10,000 of a flow "
            "run."
        ),
    ] = True
    prepare: Annotated[
        PreparationCode | None,
        Field(
            description="Code to run once in each sandbox. Each execution is a fork of its process and sees its names."
        ),
        CommandLineForm("code file"),
    ] = None
    prepare_timeout: Annotated[float, Field(gt=0, description="Seconds for prepare.")] = PREPARE_TIMEOUT_SECONDS
    prepare_seed: Annotated[
        int | None,
        Field(
            description="Seed of random generators after prepare. It is combined with the number of each execution. "
            "By default the operating system seeds them."
        ),
    ] = None
    tools: Annotated[
        ToolsByName,
        Field(
            description="Functions of the host that code can call, and values that it finds. The names are those in "
            "the code. A function is an import path such as package.module:function."
        ),
        CommandLineForm("tools", "Host function that code can call."),
    ] = field(default_factory=dict)
    tool_timeout: Annotated[
        float | None,
        Field(
            gt=0, description="Seconds for each call of a tool; none for no limit, as for a tool that asks a person."
        ),
    ] = TOOL_TIMEOUT_SECONDS
    retry_code_errors: Annotated[bool, Field(description="Also retry executions whose code failed or timed out.")] = (
        False
    )
    idempotent: Annotated[
        bool,
        Field(
            description="Also retry executions that may already have run. Their sandbox was lost, and the code may "
            "have run in it."
        ),
    ] = False
    keep_failed: Annotated[
        bool,
        Field(
            description="Keep the sandboxes of the first three failed executions for an hour. rlm-batch shell opens a "
            "terminal in one."
        ),
    ] = False
    collect: Annotated[
        list[str] | None,
        Field(
            description="Files to collect, such as *.png or out/**. They are copied from the working folder after each "
            "execution."
        ),
        CommandLineForm(metavar="PATTERN"),
    ] = None
    sub_model: Annotated[
        ModelText | None, Field(description="Model for llm_query and llm_query_batched; by default the same.")
    ] = None
    models: Annotated[
        ModelsByName | None,
        Field(
            description="Models that code can choose, such as llm_query(prompt, model='small'). The names are those in "
            "the code, and the values are like those of language_model. A list has names of models in LiteLLM."
        ),
        CommandLineForm("models", "Model that code can choose by NAME, or by its name in LiteLLM."),
    ] = None
    batch_concurrency: Annotated[int, Field(ge=1, description="Parallel model requests per execution.")] = 4
    max_depth: Annotated[
        int, Field(ge=0, description="Greatest depth of recursive queries. Plain code is at depth 0.")
    ] = 2
    max_llm_calls: Annotated[int | None, Field(ge=0, description="Model calls per execution.")] = 50
    max_llm_tokens: Annotated[
        int | None,
        Field(ge=0, description="Model tokens per execution; no limit by default. Prompts and answers count."),
    ] = None
    max_total_llm_calls: Annotated[
        int | None, Field(ge=0, description="Model calls of the whole flow run; no limit by default.")
    ] = None
    max_total_llm_tokens: Annotated[
        int | None,
        Field(ge=0, description="Model tokens of the whole flow run; no limit by default. Prompts and answers count."),
    ] = None
    max_cost: Annotated[
        float | None,
        Field(ge=0, description="US dollars for the model; no limit by default. The limit is for the whole flow run."),
        CommandLineForm(metavar="DOLLARS"),
    ] = None
    budget: Annotated[
        BudgetText | None,
        Field(description="File of a budget that other runs use too, which rlm_batch.Budget makes; none by default."),
        CommandLineForm("path"),
    ] = None
    cache_queries: Annotated[
        bool,
        Field(description="Reuse answers to identical questions. They may come from the ledgers of earlier runs."),
    ] = False
    record: Annotated[
        Literal["summary", "full"],
        Field(
            description="What the results keep of requests to language models. full adds whole prompts, answers and "
            "outputs, without credentials."
        ),
    ] = "summary"


@parameter_model(frozen=True, kw_only=True)
class CodeParameters(CommonParameters):
    """Parameters of every flow whose code can do without a language model."""

    language_model: Annotated[
        ModelText | None,
        Field(
            description="Model that code can ask, such as openai/gpt-4o-mini. It is a name in LiteLLM, or a saved "
            "block (rlm-language-model/NAME)."
        ),
    ] = None


@parameter_model(frozen=True, kw_only=True)
class LaneParameters(RunParameters):
    """Parameters of every flow that runs several executions at a time."""

    max_workers: Annotated[
        int, Field(ge=1, description="Executions at the same time. Each is in a separate sandbox.")
    ] = 4
    reuse_sandboxes: Annotated[
        bool, Field(description="Run several executions in each sandbox. Each has a separate process.")
    ] = False
    executions_per_task: Annotated[
        int | None,
        Field(
            ge=1,
            description="Executions in each Prefect task run. By default there are enough for about 1,000 task runs.",
        ),
    ] = None
    max_failures: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Failures at which to stop, such as 10; or a share of all, such as 0.1. Executions that have "
            "started continue.",
        ),
    ] = None
    cache_results: CacheResults = False


@parameter_model(frozen=True, kw_only=True)
class Options(CodeParameters, LaneParameters):
    """All shared parameters. Batch, sweep and chunks have all of them. A shard's flow takes them as JSON."""

    shards: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"] | None,
        Field(
            description="Flow runs on workers that share the work, or auto. By default the flow run does all the work."
        ),
        CommandLineForm(metavar="N|auto"),
    ] = None
    check: Annotated[
        Code | None,
        Field(
            description="Code that judges each execution, in another sandbox. Its fields are the result. It gets "
            "submitted, stdout, error, seconds, folder and the variables."
        ),
        CommandLineForm("code file"),
    ] = None

    @cached_property
    def preparation(self) -> Preparation | None:
        """The code that runs first in each sandbox, or None. Raises ConfigurationError."""
        preparation = Preparation.from_parameters(self.prepare, self.prepare_timeout, self.prepare_seed)
        return None if preparation is None else replace(preparation, code=self._read_code("prepare"))

    @cached_property
    def check_code(self) -> str | None:
        """The code of the check, or None. Raises ConfigurationError if its file cannot be read."""
        return None if self.check is None else self._read_code("check")

    def _read_code(self, name: str) -> str:
        """Return the code of a parameter, which may name a file. Raises ConfigurationError if no shard can take it."""
        code = read_text_reference(getattr(self, name))
        size = len(code.encode("utf-8", "replace"))
        if self.shards is not None and size > PARAMETER_LIMIT:
            raise ConfigurationError(
                f"`{name}` has {size:,} bytes, and with `shards` at most "
                f"{PARAMETER_LIMIT:,} are allowed: put the code into the repository or a package, and import it"
            )
        return code

    def read_secrets(self) -> dict[str, SecretStr]:
        """Return the environment variables that `secrets` names.

        Raises:
            ConfigurationError: A variable is missing, or this run cannot take secrets.
        """
        if is_deployment_run():
            refuse_secrets("a run of a deployment")
        if self.shards is not None:
            refuse_secrets("a job in shards")
        values: dict[str, SecretStr] = {}
        for name in self.secrets or ():
            if name not in os.environ:
                raise ConfigurationError(
                    f"`secrets` names {name!r}, and this process has no such environment variable: export it first"
                )
            values[name] = SecretStr(os.environ[name])
        return values

    def locate_ledger(self, run_ledger: L) -> PathOrLocation | L:
        """Return the path or location in `results_path`, by default `run_ledger`. Raises ConfigurationError."""
        return run_ledger if self.results_path is None else locate_ledger(self.results_path)


Types = Annotated[
    dict[str, Literal["int", "float", "bool", "json", "str"]] | Literal["json"] | None,
    Field(
        description="Types of CSV columns: int, float, bool, json or str. "
        "json alone reads every cell as JSON where it can, and else as text. By default the cells decide."
    ),
    CommandLineForm("types"),
]
RepeatCount = Annotated[
    int | None,
    Field(
        ge=1,
        description="Times to run each input, point or chunk. Code that reads the variable repeat gets the number of "
        "the repeat, from 0. By default everything runs once, without that variable.",
    ),
    CommandLineForm(metavar="N"),
]
Summarize = Annotated[
    Code | None,
    Field(
        description="Code that runs once after all executions, as for the F1 of all. It gets results, a list with the "
        "variables and fields of each execution. Its fields are summary_fields of the report."
    ),
    CommandLineForm("code file"),
]
VolumeName = Annotated[str | None, Field(description="Volume to mount; by default the provider's, if it has one.")]

SANDBOX, LIMITS, FAILURES, RESULTS, MODEL = "Sandbox", "Limits", "Failures", "Results", "Language model"
# The shared parameters by group, in the order of signatures, Prefect's form and the command line's help. Any other
# parameter is the flow's own.
GROUPS = {
    SANDBOX: (
        *("provider", "provider_options", "secrets", "python_path", "mounts"),
        *("prepare", "prepare_timeout", "prepare_seed", "tools", "tool_timeout"),
    ),
    LIMITS: ("max_workers", "timeout", "deadline", "reuse_sandboxes", "executions_per_task", "shards"),
    FAILURES: ("retries", "retry_code_errors", "idempotent", "on_failure", "max_failures", "keep_failed"),
    RESULTS: ("results_path", "cache_results", "collect", "check", "summarize", "log_output", "record", "on_turn"),
    MODEL: (
        *("language_model", "sub_model", "models", "batch_concurrency", "max_depth"),
        *("max_llm_calls", "max_llm_tokens", "max_total_llm_calls", "max_total_llm_tokens"),
        *("max_cost", "budget", "cache_queries"),
    ),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def find_field(annotation: Any) -> FieldInfo | None:
    """Return the bounds and the description in an annotation, or None without them."""
    infos = [item for item in get_args(annotation) if isinstance(item, FieldInfo)]
    return infos[0] if infos else None


def find_form(annotation: Any) -> CommandLineForm:
    """Return the form on the command line in an annotation, or the default form."""
    forms = [item for item in get_args(annotation) if isinstance(item, CommandLineForm)]
    return forms[0] if forms else CommandLineForm()


@cache
def find_contents(model: type[FlowParameters[Any]]) -> dict[str, Content]:
    """Return the content of each parameter whose annotation names one, such as code or a path."""
    hints = get_type_hints(model, include_extras=True)
    contents = {field.name: find_content(hints[field.name]) for field in fields(model)}  # type: ignore[arg-type]
    return {name: content for name, content in contents.items() if content is not None}


class ShownParameter(inspect.Parameter):
    """A parameter of a flow. `help` and notebooks show its type without `Annotated`, which Prefect reads."""

    def __str__(self) -> str:
        # Without `include_extras`, `get_type_hints` removes `Annotated`, also inside a type.
        hints = get_type_hints(SimpleNamespace(__annotations__={"type": self.annotation}))
        return str(inspect.Parameter(self.name, self.kind, default=self.default, annotation=hints["type"]))


def build_signature(model: type[FlowParameters[Any]]) -> inspect.Signature:
    """Return the signature of the model's flow: its own parameters first, then inherited ones, and then shared ones."""
    hints = get_type_hints(model, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for item in fields(model):  # type: ignore[arg-type]
        kind = inspect.Parameter.KEYWORD_ONLY if item.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        parameters.append(ShownParameter(item.name, kind, default=default, annotation=hints[item.name]))
    positional = [item for item in parameters if item.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {item.name: item for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    own_names = [name for name in vars(model).get("__annotations__", {}) if name not in GROUP_OF]
    inherited_names = [name for name in keywords if name not in GROUP_OF and name not in own_names]
    order = [*own_names, *inherited_names, *GROUP_OF]
    return inspect.Signature([*positional, *(keywords[name] for name in order if name in keywords)])


def refuse_secrets(what: str) -> NoReturn:
    """Raise ConfigurationError: `what`, such as a deployment, runs in another process, which cannot get the secrets."""
    raise ConfigurationError(
        f"{what} cannot take `secrets`, whose values stay in this process: save them in the "
        "environment of a block, and pass the block as the provider"
    )
