"""The commands that run or deploy a flow, built from the flow's parameter model."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter, Token
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..blocks.registry import PROVIDERS
from ..blocks.settings import COMMON
from ..flows.inputs.conversion import DATA_PARAMETERS
from ..flows.parameters import (
    GROUP_OF,
    GROUPS,
    LIMITS,
    RESULTS,
    SANDBOX,
    FlowParameters,
    build_signature,
    find_field,
    find_form,
)
from ..flows.registry import FLOWS, load_model
from ..sandbox.errors import ConfigurationError
from .argument_parsing import (
    build_provider,
    parse_grid,
    parse_space,
    read_code,
    read_json_file,
    refuse_data,
    resolve_path,
)
from .option_names import LEFT_OUT, OPTIONS_BY_PARAMETER
from .output import Json, OutputFormat, ShowOutput, ShowUsage

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
# Groups of the help besides those of the shared parameters. The first ten common options have a separate group.
DEPLOYMENT, COMMON_OPTIONS = "Deployment", "Common options"
MAX_COMMON_OPTIONS = 10
# Names of values in the help, by the units with which descriptions start.
UNITS = {"Seconds": "SECONDS", "MiB": "MIB", "GiB": "GIB"}
NO_DEFAULTS = (None, False, "", PydanticUndefined)  # defaults of settings that the help does not show

Isolation = Annotated[
    Literal["bubblewrap", "landlock", "none"] | None,
    Parameter(help="Isolation to require; none runs code without isolation", metavar="LEVEL"),
]
Objectives = list[str] | None


# A command's action on a flow: run it, or deploy it. It takes the flow's parameter model, the files of code that the
# command line named, and the parameters that it set, and returns the exit status.
FlowAction = Callable[[type[FlowParameters[Any]], list[str], dict[str, Any]], int]


def make_run_action(show_output: bool = False, json: bool = False, usage: bool = False) -> FlowAction:
    """Return the action of a command that runs a flow here, and prints its outcomes."""

    def run(model: type[FlowParameters[Any]], files: list[str], values: dict[str, Any]) -> int:
        from .run_flow import run_flow

        return run_flow(model, files, OutputFormat(show_output, json, usage), values)

    return run


@dataclass(frozen=True, slots=True)
class WordReader:
    """The conversion of a parameter's words on the command line to its value.

    Args:
        kind: The type that the command line parses.
        read: Returns the parameter's value.
        metavar: The name of the words in the help.
    """

    kind: Any
    read: Callable[[Any], Any]
    metavar: str


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a flow's command.

    Args:
        parameter: The option's name, type, default and help text.
        group: The option's group in the help.
        is_common: Whether the help shows the option in the first group, if there is room.
    """

    parameter: inspect.Parameter
    group: str
    is_common: bool = False


def read_code_files(files: list[str]) -> list[str] | str:
    """Return the text of one file, or a list of the texts of several files. Raises ConfigurationError."""
    codes = [read_code(file) for file in files]
    return codes[0] if len(codes) == 1 else codes


OBJECTIVES = {
    "minimize": "Submitted field that is least in the best trial",
    "maximize": "Submitted field that is greatest in the best trial",
}


def make_provider_options(taken: Collection[str]) -> list[Option]:
    """Return an option for each provider setting that a run may override, unless the setting's name is `taken`.

    A setting of one provider is in that provider's group. A setting of several providers is in the group of limits if
    it is a number, and otherwise in the group of the sandbox.
    """
    fields: dict[str, dict[str, FieldInfo]] = {}  # fields by setting and provider
    for entry in PROVIDERS.values():
        for name, field in entry.load_settings().list_run_settings().items():
            if name not in taken:
                fields.setdefault(name, {})[entry.name] = field
    options: list[Option] = []
    for name, by_provider in fields.items():
        field = next(iter(by_provider.values()))
        is_list, is_number = "list" in str(field.annotation), _is_number(field.annotation)
        # The provider converts the words later, because a setting may be an integer in one of them and text in another.
        kind: Any = bool if field.annotation is bool else list[str] if is_list else str
        is_shared = len(by_provider) > 1
        group = (LIMITS if is_number else SANDBOX) if is_shared else next(iter(by_provider)).title()
        texts = {provider: _write_help(item.description or "", is_list) for provider, item in by_provider.items()}
        defaults = {
            provider: str(item.default) for provider, item in by_provider.items() if item.default not in NO_DEFAULTS
        }
        details = Parameter(
            help=_join(texts, len(PROVIDERS) if is_shared else 1),
            negative=() if is_list else None,
            metavar=_name_value(name, field.annotation, field.description),
            show_default=_join(defaults, len(by_provider)) or False,
        )
        options.append(Option(_make_option(name, kind | None, details), group, COMMON in field.metadata))
    return options


def _join(texts: Mapping[str, str], count: int) -> str:
    """Return each text with its providers in brackets, or a text that `count` providers share alone."""
    providers: dict[str, list[str]] = {}
    for provider, text in texts.items():
        providers.setdefault(text, []).append(provider)
    return "; ".join(
        text if len(names) == count else f"{text} ({', '.join(names)})" for text, names in providers.items()
    )


Environment = Annotated[
    list[str] | None,
    Parameter(
        help="Environment variable of the code; the run shows its value, so use --secret for secrets (repeatable)",
        metavar="NAME=VALUE",
        negative=(),
    ),
]
OUTPUT_OPTIONS = [
    Option(inspect.Parameter("show_output", KEYWORD_ONLY, default=False, annotation=ShowOutput), RESULTS, True),
    Option(inspect.Parameter("json", KEYWORD_ONLY, default=False, annotation=Json), RESULTS, True),
    Option(inspect.Parameter("usage", KEYWORD_ONLY, default=False, annotation=ShowUsage), RESULTS),
]


def build_flow_command(
    model: type[FlowParameters[Any]],
    action_options: list[Option],
    make_action: Callable[..., FlowAction],
) -> Callable[..., int]:
    """Return the command of a flow.

    Args:
        model: The flow's parameter model. Each parameter becomes an argument or an option.
        action_options: More options, from which `make_action` makes the action.
        make_action: Returns the command's action on the flow's parameters.
    """
    parameters = build_signature(model).parameters
    readers: dict[str, tuple[str, WordReader | None]] = {}  # parameters and readers by the names of options
    file_option = ""
    arguments: list[inspect.Parameter] = []
    options: list[Option] = []
    own_group = model.flow_name.title()
    for name, parameter in parameters.items():
        form = find_form(parameter.annotation)
        if name in LEFT_OUT or form.form == "hidden":
            continue
        group = GROUP_OF.get(name, own_group) if parameter.kind is KEYWORD_ONLY else own_group
        if form.form == "objectives":
            for word, text in OBJECTIVES.items():
                details = Parameter(help=_write_help(text, is_list=True), negative=(), metavar="FIELD")
                options.append(Option(_make_option(word, Objectives, details), group, form.is_common))
            continue
        option = _make_parameter_option(parameter)
        if form.form.startswith("code") and form.is_argument:
            file_option = option.name
        readers[option.name] = name, None if form.form == "value" else READERS[form.form]
        if form.is_argument:
            arguments.append(option)
        else:
            options.append(Option(option, group, form.is_common))
    isolation = inspect.Parameter("isolation", KEYWORD_ONLY, default=None, annotation=Isolation)
    env = inspect.Parameter("env", KEYWORD_ONLY, default=None, annotation=Environment)
    options += [Option(isolation, PROVIDERS["local"].name.title()), Option(env, SANDBOX), *action_options]
    settings_options = make_provider_options({option.parameter.name for option in options})
    action_names = [option.parameter.name for option in action_options]
    setting_names = [option.parameter.name for option in settings_options]
    signature = [*arguments, *_arrange_options([*options, *settings_options], own_group)]

    def run(*arguments: Any, **options: Any) -> int:
        bound = inspect.Signature(signature).bind_partial(*arguments, **options).arguments
        action = make_action(**{name: bound[name] for name in action_names if name in bound})
        settings = {name: bound[name] for name in setting_names if bound.get(name) is not None}
        files = bound.get(file_option, [])
        files = [files] if isinstance(files, str) else list(files)
        refuse_data(files, next((f"--{name}" for name in DATA_PARAMETERS if name in parameters), ""))
        values: dict[str, Any] = {}
        for option, (name, reader) in readers.items():
            if option in bound:
                value = bound[option]
                values[name] = value if reader is None or value is None else reader.read(value)
        settings = {name: None if value == "none" else value for name, value in settings.items()}
        if bound.get("env"):
            settings["environment"] = _read_pairs("env", bound["env"])
        if settings:
            values["provider_options"] = settings
        if bound.get("isolation") is not None:
            values["provider"] = build_provider(values.get("provider", "local"), bound["isolation"])
        values |= _read_objectives(bound.get("minimize") or [], bound.get("maximize") or [])
        return action(model, files, values)

    run.__name__ = model.flow_name
    run.__doc__ = FLOWS[model.flow_name]
    run.__signature__ = inspect.Signature(signature, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return run


def __getattr__(name: str) -> Callable[..., int]:
    """Build the command of a flow when it is first used."""
    if name not in FLOWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_flow_command(load_model(name), OUTPUT_OPTIONS, make_run_action)


def _make_parameter_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the argument or the option of a parameter."""
    form = find_form(parameter.annotation)
    field = find_field(parameter.annotation)
    assert field is not None
    reader = None if form.form == "value" else READERS[form.form]
    kind = get_args(parameter.annotation)[0] if reader is None else reader.kind
    is_list = "list" in str(kind)
    text = form.help or field.description or ""
    if form.is_argument:
        name = {"code file": "file", "code files": "files"}.get(form.form, parameter.name)
        words: Any = list[str] if kind == list[str] else str
        is_optional = parameter.default is None
        annotation = Annotated[words | None if is_optional else words, Parameter(help=_write_help(text), negative=())]
        default = None if is_optional else inspect.Parameter.empty
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, default=default, annotation=annotation)
    details = Parameter(
        help=_write_help(text, is_list),
        metavar=form.metavar or (reader.metavar if reader else _name_value(parameter.name, kind, field.description)),
        show_default=False if parameter.default is False or parameter.default == "" else None,
        show_choices=not form.metavar,
        # An option that is off by default needs no negative form.
        negative=() if is_list or parameter.default is False else None,
        converter=_read_words if is_list and form.form not in ("grid", "space") else None,
    )
    default = None if parameter.default == {} else parameter.default
    return _make_option(OPTIONS_BY_PARAMETER.get(parameter.name, parameter.name), kind, details, default)


def _arrange_options(options: list[Option], own_group: str) -> list[inspect.Parameter]:
    """Return the options' parameters in the order of the help, each with its group."""
    providers = [name.title() for name in PROVIDERS]
    order = {name: number for number, name in enumerate([DEPLOYMENT, COMMON_OPTIONS, own_group, *GROUPS, *providers])}
    in_order = sorted(options, key=lambda option: order[option.group])
    common = [option for option in in_order if option.is_common][:MAX_COMMON_OPTIONS]
    parameters: list[inspect.Parameter] = []
    for option in [*common, *(option for option in in_order if option not in common)]:
        name = COMMON_OPTIONS if option in common else option.group
        annotation = Annotated[option.parameter.annotation, Parameter(group=Group(name, sort_key=order[name]))]
        parameters.append(option.parameter.replace(annotation=annotation))
    return parameters


def _write_help(description: str, is_list: bool = False) -> str:
    """Return an option's help text: the description's first sentence."""
    sentence = description.partition(". ")[0].removesuffix(".")
    return f"{sentence} (repeatable)" if is_list else sentence


def _is_number(kind: Any) -> bool:
    return not {int, float}.isdisjoint((kind, *get_args(kind)))


def _name_value(name: str, kind: Any, description: str | None) -> str:
    """Return the name of an option's value in the help: a number's unit, or the last word of the option's name."""
    if _is_number(kind):
        return UNITS.get((description or "").partition(" ")[0], "N")
    word = name.rpartition("_")[2].upper()
    return word.removesuffix("S") if "list" in str(kind) else word


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


def _read_pairs(option: str, words: Sequence[str], *, needs_value: bool = True) -> dict[str, str]:
    """Return values by name, from words such as `STAGE=test`. Raises ConfigurationError."""
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (needs_value and not equals):
            raise ConfigurationError(f"--{option} {word}: give a name and a value, as in NAME=VALUE")
        if name in pairs:
            raise ConfigurationError(f"--{option} sets {name} twice: leave one out")
        pairs[name] = value if equals else name
    return pairs


def _read_types(words: Sequence[str]) -> dict[str, str] | str:
    """Return the types of columns, from words such as `zip=str`. The single word json applies to all columns."""
    return "json" if words == ["json"] else _read_pairs("types", re.split(r"\s*,\s*", ",".join(words)))


def _read_paths(words: Sequence[str]) -> list[str] | str | None:
    """Return one absolute path, or a list of several."""
    paths = [str(resolve_path(word)) for word in words]
    return paths[0] if len(paths) == 1 else paths


def _read_words(_kind: Any, tokens: Sequence[Token]) -> list[str] | None:
    """Return the words of a repeatable option, or None for the word none."""
    words = [token.value for token in tokens]
    return None if words == ["none"] else words


# The keys are the names in `CommandLineForm.form`.
READERS = {
    "code file": WordReader(str | None, read_code, "FILE"),
    "code files": WordReader(list[str], read_code_files, "FILE"),
    "path": WordReader(str | None, resolve_path, "FILE"),
    "paths": WordReader(list[str] | None, _read_paths, "FILE"),
    "names": WordReader(list[str] | None, list, "FIELD"),
    "text": WordReader(str, str, "TEXT"),
    "output type": WordReader(str | None, read_json_file, "FILE"),
    "mounts": WordReader(list[str] | None, partial(_read_pairs, "mounts"), "TARGET=PATH"),
    "tools": WordReader(list[str] | None, partial(_read_pairs, "tools"), "NAME=MODULE:FUNCTION"),
    "models": WordReader(list[str] | None, partial(_read_pairs, "models", needs_value=False), "NAME=MODEL"),
    "types": WordReader(list[str] | None, _read_types, "COLUMN=TYPE"),
    "grid": WordReader(list[str] | None, parse_grid, "NAME=VALUES"),
    "space": WordReader(list[str] | None, parse_space, "NAME=BOUNDS"),
}
