"""The options of commands that run a flow, made from the parameters that flows share: flows/parameters.py."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, get_args

from cyclopts import Parameter, Token
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..blocks.host_files.mounts import locate_mounts
from ..blocks.host_files.python_path import locate_directories
from ..blocks.registry import PROVIDERS
from ..flows.inputs.cells import ColumnType
from ..flows.parameters import field_of, signature_of
from ..sandbox.driver_settings import Preparation
from ..sandbox.errors import ConfigurationError
from ..sandbox.intake.collected_files import check_patterns
from ..tasks.host_tools import name_tools
from .argument_parsing import build_provider, read_code, resolve_path
from .outcome_output import OutputFormat

OPTION_NAMES = {"cache_results": "resume"}  # where an option is not called as its parameter
# Parameters without an option: what failed is printed, and the exit status tells of it; a provider's settings have an
# option each.
LEFT_OUT = ("on_failure", "provider_options")

Isolation = Annotated[
    Literal["bubblewrap", "landlock", "none"] | None,
    Parameter(help="For the local provider: insist on one level. none runs code with no isolation."),
]
ShowOutput = Annotated[bool, Parameter(help="Print all that the code has printed, after the table.", negative=())]
Json = Annotated[
    bool, Parameter(help="Print a line of JSON for each row in the place of the table, with whole values.", negative=())
]


class FlowAction(Protocol):
    """What is done with a flow's name, the files of code that were named, and its parameters: a run, or a deployment.

    Returns the exit status.
    """

    def __call__(self, flow: str, files: Sequence[str], /, **parameters: Any) -> int: ...


@dataclass(frozen=True, slots=True)
class RunAction:
    """Runs the flow here, and prints its outcomes."""

    output: OutputFormat

    def __call__(self, flow: str, files: Sequence[str], /, **parameters: Any) -> int:
        # Prefect, which it imports, takes a second: what is wrong with a file is said before.
        from .run_flow import run_flow

        return run_flow(flow, list(files), self.output, parameters)


def make_provider_options(taken: Collection[str]) -> list[inspect.Parameter]:
    """An option for each setting that a run may have, of any provider, whose name is not `taken` by another option."""
    fields: dict[str, FieldInfo] = {}
    providers: dict[str, list[str]] = {}
    for entry in PROVIDERS.values():
        for name, field in entry.load_settings().list_run_settings().items():
            if name not in taken:
                fields.setdefault(name, field)
                providers.setdefault(name, []).append(entry.name)
    options: list[inspect.Parameter] = []
    for name, field in fields.items():
        note = "" if len(providers[name]) == len(PROVIDERS) else f" ({', '.join(providers[name])})"
        is_list = "list" in str(field.annotation)
        # Words, which the provider's own settings make numbers of: one has an integer where another has not.
        kind: Any = bool if field.annotation is bool else list[str] if is_list else str
        details = Parameter(help=f"{field.description}{note}", negative=() if is_list else None, group="Provider")
        annotation = Annotated[kind | None, details]
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return options


OUTPUT_OPTIONS = [
    inspect.Parameter("show_output", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=ShowOutput),
    inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json),
]


def add_flow_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command an option for each shared parameter of its flow, with the same default, bounds and description.

    They are those of the TypedDict that its `**parameters` unpacks. The command is called with the parameters that were
    asked for, in the place of its `**parameters`, and with what is to be done with them as `action`: the flow runs.
    """

    def make_action(show_output: bool = False, json: bool = False) -> FlowAction:
        return RunAction(OutputFormat(show_output, json))

    return build_flow_command(command, OUTPUT_OPTIONS, make_action)


def build_flow_command(
    command: Callable[..., int], action_options: list[inspect.Parameter], make_action: Callable[..., FlowAction]
) -> Callable[..., int]:
    """The command with the options of its flow, and those that `make_action` makes its `action` of."""
    hints: dict[str, Any] = {}  # of the shared parameters, by their names
    signature: list[inspect.Parameter] = []
    for parameter in signature_of(command).parameters.values():
        if parameter.name == "action":  # it is made of the options for it
            continue
        if field_of(parameter.annotation) is None:
            signature.append(parameter)
        elif parameter.name not in LEFT_OUT:
            hints[parameter.name] = parameter.annotation
            signature.append(_make_option(parameter))
    signature.append(inspect.Parameter("isolation", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Isolation))
    signature += action_options
    provider_options = make_provider_options({parameter.name for parameter in signature})
    signature += provider_options

    @functools.wraps(command)
    def run(*arguments: Any, isolation: Any = None, **options: Any) -> int:
        names = [option.name for option in action_options if option.name in options]
        action = make_action(**{name: options.pop(name) for name in names})
        given = {name: options.pop(_get_option_name(name)) for name in hints if _get_option_name(name) in options}
        settings = {option.name: options.pop(option.name, None) for option in provider_options}
        settings = {name: None if value == "none" else value for name, value in settings.items() if value is not None}
        if isolation is not None:
            given["provider"] = build_provider(given.get("provider", "local"), isolation)
        if "results_path" in given:
            given["results_path"] = resolve_path(given["results_path"])
        if given.get("python_path") is not None:
            given["python_path"] = [str(path) for path in locate_directories(given["python_path"])]
        if given.get("mounts") is not None:
            given["mounts"] = _read_mounts(given["mounts"])
        if given.get("types") is not None:
            given["types"] = _read_types(given["types"])
        if given.get("tools") is not None:
            given["tools"] = _read_tools(given["tools"])
        check_patterns(given.get("collect"))
        if given.get("prepare") is not None:
            given["prepare"] = read_code(given["prepare"])
        check_values(hints, given)
        if settings:
            given["provider_options"] = settings
        Preparation.from_parameters(given.get("prepare"), None, given.get("prepare_seed"))
        return command(*arguments, **options, **given, action=action)

    run.__signature__ = inspect.Signature(signature, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return run


def check_values(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ConfigurationError, with a part for each value that is not within its parameter's bounds."""
    problems: list[str] = []
    for name, value in values.items():
        try:
            TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            problems += [f"{name}: {problem['msg']}" for problem in error.errors()]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _get_option_name(parameter_name: str) -> str:
    return OPTION_NAMES.get(parameter_name, parameter_name)


def _make_option(parameter: inspect.Parameter) -> inspect.Parameter:
    field = field_of(parameter.annotation)
    assert field is not None
    kind = get_args(parameter.annotation)[0]
    if parameter.name == "types":
        kind = list[str] | None  # of a dict's the command line takes one
        words = "COLUMN=TYPE once for each, or json"
        details = Parameter(help=f"{field.description}: {words}.", negative=(), converter=_read_words)
    elif parameter.name == "mounts":
        kind = list[str] | None
        help_text = f"{field.description}: TARGET=PATH, once for each."
        details = Parameter(help=help_text, negative=(), converter=_read_words)
    elif parameter.name == "tools":
        kind = list[str] | None
        help_text = f"{field.description}: NAME=MODULE:FUNCTION, once for each."
        details = Parameter(help=help_text, negative=(), converter=_read_words)
    elif "list" in str(kind):
        details = Parameter(help=f"{field.description}.", negative=(), converter=_read_words)
    else:
        negative = () if field.default is False else None  # nobody asks for what is not done anyway
        details = Parameter(help=f"{field.description}.", negative=negative)
    return parameter.replace(name=_get_option_name(parameter.name), annotation=Annotated[kind, details])


def _read_types(words: Sequence[str]) -> dict[str, str] | str:
    """Return the types of columns, from words such as `zip=str`; a word of its own stands for all of them."""
    if words == ["json"]:
        return "json"
    types: dict[str, str] = {}
    for word in ",".join(words).split(","):
        name, equals, kind = map(str.strip, word.rpartition("="))
        if not equals or not name:
            raise ConfigurationError(f"--types {word}: it is a column and its type, as in zip=str; or json for all")
        if kind not in get_args(ColumnType):
            raise ConfigurationError(
                f"--types {word}: there is no type {kind!r}, but {', '.join(get_args(ColumnType))}"
            )
        if name in types:
            raise ConfigurationError(f"--types {word}: {name} is named twice")
        types[name] = kind
    return types


def _read_tools(words: Sequence[str]) -> dict[str, str]:
    """Import paths by the names that code calls them by, of words such as `lookup=package.module:function`."""
    pairs = [word.partition("=") for word in words]
    return name_tools({name: path for name, _, path in pairs})


def _read_mounts(words: Sequence[str]) -> dict[str, str]:
    """Paths of the host by those in sandboxes, of words such as `/data/set=data`. Raises ConfigurationError."""
    mounts: dict[str, str] = {}
    for word in words:
        target, _, source = word.partition("=")
        if not target or not source:
            raise ConfigurationError(
                f"--mounts {word}: it is the path at which code reads it and a path of this machine, as in "
                "/data/set=data"
            )
        if target in mounts:
            raise ConfigurationError(f"--mounts {word}: {target} is named twice")
        mounts[target] = source
    return {target: str(source) for target, source in locate_mounts(mounts).items()}


def _read_words(_kind: Any, tokens: Sequence[Token]) -> list[str] | None:
    """The words of an option that may come several times; None where it is none."""
    words = [token.value for token in tokens]
    return None if words == ["none"] else words
