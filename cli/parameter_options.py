"""The commands that run or deploy a flow, built from the flow's parameter model."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter, Token
from pydantic.fields import FieldInfo

from ..blocks.registry import PROVIDERS
from ..flows.inputs.cells import ColumnType
from ..flows.parameters import FlowParameters, build_signature, find_field, find_form
from ..sandbox.errors import ConfigurationError
from .argument_parsing import build_provider, parse_grid, parse_space, read_code, resolve_path
from .output import OutputFormat

OPTION_NAMES = {"cache_results": "resume"}  # options that are not called as their parameter
# Parameters without an option. The command prints failures and shows them in its exit status. Each setting of a
# provider has a separate option.
LEFT_OUT = ("on_failure", "provider_options")
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

Isolation = Annotated[
    Literal["bubblewrap", "landlock", "none"] | None,
    Parameter(help="For the local provider: insist on one level. none runs code with no isolation."),
]
ShowOutput = Annotated[bool, Parameter(help="Print all that the code has printed, after the table.", negative=())]
Json = Annotated[
    bool, Parameter(help="Print a line of JSON for each row in the place of the table, with whole values.", negative=())
]
Objectives = list[str] | None


# A command's action on a flow: run it, or deploy it. It takes the flow's parameter model, the files of code that the
# command line named, and the parameters that it set, and returns the exit status.
FlowAction = Callable[[type[FlowParameters[Any]], list[str], dict[str, Any]], int]


def make_run_action(show_output: bool = False, json: bool = False) -> FlowAction:
    """Return the action of a command that runs a flow here, and prints its outcomes."""

    def run(model: type[FlowParameters[Any]], files: list[str], values: dict[str, Any]) -> int:
        from .run_flow import run_flow

        return run_flow(model, files, OutputFormat(show_output, json), values)

    return run


@dataclass(frozen=True, slots=True)
class WordReader:
    """The way from a parameter's words on the command line to its value.

    Args:
        kind: The type that the command line parses.
        read: Makes the parameter's value of it; None where it is the value.
        suffix: Added to the option's help text.
    """

    kind: Any
    read: Callable[[Any], Any]
    suffix: str = ""


def read_code_files(files: list[str]) -> list[str] | str:
    """Return the text of one file, or of each of several. Raises ConfigurationError."""
    codes = [read_code(file) for file in files]
    return codes[0] if len(codes) == 1 else codes


OBJECTIVES = {
    "minimize": "The submitted field that is least in the best trial; with several objectives once for each.",
    "maximize": "The submitted field that is greatest in the best trial, likewise.",
}


def make_provider_options(taken: Collection[str]) -> list[inspect.Parameter]:
    """Return an option for each setting that a run may have, of any provider, unless its name is `taken`."""
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
        # The provider's own settings convert the words: one provider has an integer where another has text.
        kind: Any = bool if field.annotation is bool else list[str] if is_list else str
        details = Parameter(help=f"{field.description}{note}", negative=() if is_list else None, group="Provider")
        options.append(_make_option(name, kind | None, details))
    return options


OUTPUT_OPTIONS = [
    inspect.Parameter("show_output", KEYWORD_ONLY, default=False, annotation=ShowOutput),
    inspect.Parameter("json", KEYWORD_ONLY, default=False, annotation=Json),
]


def build_flow_command(
    model: type[FlowParameters[Any]],
    action_options: list[inspect.Parameter],
    make_action: Callable[..., FlowAction],
) -> Callable[..., int]:
    """Return the command of a flow.

    Args:
        model: The flow's parameter model. Each parameter becomes an argument or an option.
        action_options: More options, from which `make_action` makes the action.
        make_action: Returns what the command does with the parameters.
    """
    parameters = build_signature(model).parameters
    readers: dict[str, tuple[str, WordReader | None]] = {}  # parameters and readers by the names of options
    file_option = ""
    signature: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        form = find_form(parameter.annotation)
        if name in LEFT_OUT or form.form == "hidden":
            continue
        if form.form == "objectives":
            for word, text in OBJECTIVES.items():
                signature.append(_make_option(word, Objectives, Parameter(help=text, negative=())))
            continue
        option = _make_parameter_option(parameter)
        if form.form.startswith("code") and form.is_argument:
            file_option = option.name
        readers[option.name] = name, None if form.form == "value" else READERS[form.form]
        signature.append(option)
    signature.append(inspect.Parameter("isolation", KEYWORD_ONLY, default=None, annotation=Isolation))
    signature += action_options
    provider_options = make_provider_options({parameter.name for parameter in signature})
    signature += provider_options
    signature.sort(key=lambda option: option.kind)

    def run(*arguments: Any, **options: Any) -> int:
        bound = inspect.Signature(signature).bind_partial(*arguments, **options).arguments
        action = make_action(**{option.name: bound[option.name] for option in action_options if option.name in bound})
        settings = {
            option.name: bound[option.name] for option in provider_options if bound.get(option.name) is not None
        }
        values: dict[str, Any] = {}
        for option, (name, reader) in readers.items():
            if option in bound:
                value = bound[option]
                values[name] = value if reader is None or value is None else reader.read(value)
        if settings:
            values["provider_options"] = {name: None if value == "none" else value for name, value in settings.items()}
        if bound.get("isolation") is not None:
            values["provider"] = build_provider(values.get("provider", "local"), bound["isolation"])
        values |= _read_objectives(bound.get("minimize") or [], bound.get("maximize") or [])
        files = bound.get(file_option, [])
        return action(model, [files] if isinstance(files, str) else list(files), values)

    run.__name__ = model.flow_name
    run.__doc__ = model.summary
    run.__signature__ = inspect.Signature(signature, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return run


def _make_parameter_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the argument or the option of a parameter."""
    form = find_form(parameter.annotation)
    field = find_field(parameter.annotation)
    assert field is not None
    reader = None if form.form == "value" else READERS[form.form]
    kind = get_args(parameter.annotation)[0] if reader is None else reader.kind
    text = f"{form.help or field.description}{reader.suffix if reader else ''}."
    if form.is_argument:
        name = {"code file": "file", "code files": "files"}.get(form.form, parameter.name)
        annotation = Annotated[list[str] if kind == list[str] else str, Parameter(help=text, negative=())]
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)
    is_list = "list" in str(kind)
    details = Parameter(
        help=text,
        # An option that is off by default needs no negative form.
        negative=() if is_list or parameter.default is False else None,
        converter=_read_words if is_list and form.form not in ("grid", "space") else None,
    )
    return _make_option(OPTION_NAMES.get(parameter.name, parameter.name), kind, details, parameter.default)


def _make_option(name: str, kind: Any, details: Parameter, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, KEYWORD_ONLY, default=default, annotation=Annotated[kind, details])


def _read_objectives(minimize: list[str], maximize: list[str]) -> dict[str, Any]:
    """Return the objective and its direction, or lists of both, or an empty dict without objectives."""
    objectives = [*minimize, *maximize]
    directions = ["minimize"] * len(minimize) + ["maximize"] * len(maximize)
    if not objectives:
        return {}
    if len(objectives) == 1:
        return {"objective": objectives[0], "direction": directions[0]}
    return {"objective": objectives, "direction": directions}


def _read_types(words: Sequence[str]) -> dict[str, str] | str:
    """Return the types of columns, from words such as `zip=str`; the one word json means all of them."""
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


def _read_tools(words: Sequence[str]) -> Mapping[str, str]:
    """Return import paths by tool names, from words such as `lookup=package.module:function`."""
    return {name: path for name, _, path in (word.partition("=") for word in words)}


def _read_mounts(words: Sequence[str]) -> dict[str, str]:
    """Return paths of the host by paths in sandboxes, from words such as `/data/set=data`."""
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
    return mounts


def _read_words(_kind: Any, tokens: Sequence[Token]) -> list[str] | None:
    """Return the words of an option that may come several times; None for the word none."""
    words = [token.value for token in tokens]
    return None if words == ["none"] else words


# By the name in a parameter's `CommandLineForm`.
READERS = {
    "code file": WordReader(str | None, read_code),
    "code files": WordReader(list[str], read_code_files),
    "path": WordReader(str | None, resolve_path),
    "mounts": WordReader(list[str] | None, _read_mounts, ": TARGET=PATH, once for each"),
    "tools": WordReader(list[str] | None, _read_tools, ": NAME=MODULE:FUNCTION, once for each"),
    "types": WordReader(list[str] | None, _read_types, ": COLUMN=TYPE once for each, or json"),
    "grid": WordReader(list[str] | None, parse_grid),
    "space": WordReader(list[str] | None, parse_space),
}
