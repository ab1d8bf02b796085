"""The commands that run or deploy a flow, built from the flow's parameter model."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter, Token
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..blocks.registry import PROVIDERS
from ..flows.parameters import (
    GROUP_OF,
    GROUPS,
    LIMITS,
    RESULTS,
    SANDBOX,
    CommandLineForm,
    FlowParameters,
    build_signature,
    find_field,
    find_form,
)
from ..flows.registry import FLOWS, load_model
from ..sandbox.errors import ConfigurationError
from .argument_parsing import (
    parse_grid,
    parse_space,
    read_code,
    read_json_file,
    read_pairs,
    resolve_path,
)
from .option_names import LEFT_OUT, OPTIONS_BY_PARAMETER
from .output import Json, OutputFormat, ShowOutput, ShowUsage

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
# Groups of the help besides those of the shared parameters.
DEPLOYMENT, COMMON_OPTIONS = "Deployment", "Common options"
# The options that most runs need. The first ten that a flow has are in a separate group.
MAX_COMMON_OPTIONS = 10
COMMON_NAMES = (
    *("inputs", "grid", "points", "minimize", "maximize", "space", "trials"),
    *("chunks", "data", "chunk_size", "reduce", "stop_on_error"),
    *("context", "context_file", "queries", "output_type"),
    *("provider", "packages", "max_workers", "timeout", "results_path", "resume", "collect"),
    *("language_model", "max_cost", "show_output", "json"),
)
# Names of values in the help, by the units with which descriptions start.
UNITS = {"Seconds": "SECONDS", "MiB": "MIB", "GiB": "GIB"}
NO_DEFAULTS = (None, False, "", PydanticUndefined)  # defaults of settings that the help does not show

Isolation = Annotated[
    Literal["bubblewrap", "landlock", "none"] | None,
    Parameter(help="Isolation to require; none runs code without isolation", metavar="LEVEL"),
]
OBJECTIVES = {
    "minimize": "Submitted field that is least in the best trial",
    "maximize": "Submitted field that is greatest in the best trial",
}
# A command's action on a flow: it runs the flow, or deploys it. Its arguments are the flow's parameter model, and the
# files of code and the parameters on the command line. It returns the exit status.
FlowAction = Callable[[type[FlowParameters[Any]], list[str], dict[str, Any]], int]


def make_run_action(
    show_output: bool = False,
    json: bool = False,
    usage: bool = False,
    name: str | None = None,
    tag: Sequence[str] | None = None,
) -> FlowAction:
    """Return the action of a command that runs a flow here, with a name and tags, and prints its outcomes."""

    def run(model: type[FlowParameters[Any]], files: list[str], values: dict[str, Any]) -> int:
        from .run_flow import run_flow

        return run_flow(model, files, OutputFormat(show_output, json, usage), values, name, tag or ())

    return run


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class WordReader:
    """The conversion of words on the command line to a parameter's value.

    Args:
        kind: The type that cyclopts parses from the words.
        read: Converts the parsed words to the parameter's value.
        metavar: The name of the words in the help.
    """

    kind: Any
    read: Callable[[Any], Any] = _keep
    metavar: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument or option of a flow's command.

    Args:
        parameter: The option's name, type, default and help text. Its kind says whether it is an argument.
        group: The option's group in the help.
        target: The flow's parameter that the option sets; empty for options of the command.
        read: Converts the parsed words to the parameter's value.
    """

    parameter: inspect.Parameter
    group: str
    target: str = ""
    read: Callable[[Any], Any] = _keep


def read_code_files(files: list[str]) -> list[str] | str:
    """Return the text of one file, or a list of the texts of several files. Raises ConfigurationError."""
    codes = [read_code(file) for file in files]
    return codes[0] if len(codes) == 1 else codes


def _make_settings_options(taken: set[str]) -> list[Option]:
    """Return an option for each provider setting that a run may override, unless the setting's name is `taken`."""
    fields_by_setting: dict[str, dict[str, FieldInfo]] = {}  # For each setting, its field in each provider.
    for entry in PROVIDERS.values():
        for name, field in entry.load_settings().list_run_settings().items():
            if name not in taken:
                fields_by_setting.setdefault(name, {})[entry.name] = field
    return [_make_settings_option(name, fields) for name, fields in fields_by_setting.items()]


def _make_settings_option(name: str, fields: dict[str, FieldInfo]) -> Option:
    """Return the option of a setting from its fields by provider.

    A setting of one provider is in that provider's group. A setting of several providers is in the group of limits if
    it is a number, and otherwise in the group of the sandbox.
    """
    providers = list(fields)
    field = fields[providers[0]]
    is_list = _is_list(field.annotation)
    # The provider converts the words later, because a setting may be an integer in one provider and text in another.
    kind: Any = str
    if field.annotation is bool:
        kind = bool
    elif is_list:
        kind = list[str]
    if len(providers) == 1:
        group, known_providers = providers[0].title(), providers
    else:
        group, known_providers = LIMITS if _is_number(field.annotation) else SANDBOX, list(PROVIDERS)
    help_texts = {provider: _write_help(item.description or "", is_list) for provider, item in fields.items()}
    defaults = {provider: str(item.default) for provider, item in fields.items() if item.default not in NO_DEFAULTS}
    details = Parameter(
        help=_join_texts(help_texts, known_providers),
        negative=() if is_list else None,
        metavar=_name_value(name, field.annotation, field.description),
        show_default=_join_texts(defaults, providers) or False,
    )
    return Option(_make_option(name, kind | None, details), group)


def _join_texts(texts: Mapping[str, str], known_providers: list[str]) -> str:
    """Join texts by provider. A note names the providers of a text, unless all `known_providers` have it."""
    providers_by_text: dict[str, list[str]] = {}
    for provider, text in texts.items():
        providers_by_text.setdefault(text, []).append(provider)
    parts: list[str] = []
    for text, names in providers_by_text.items():
        parts.append(text if names == known_providers else f"{text} ({', '.join(names)})")
    return "; ".join(parts)


Environment = Annotated[
    list[str] | None,
    Parameter(
        help="Environment variable of the code; the run shows its value, so use --secret for secrets (repeatable)",
        metavar="NAME=VALUE",
        negative=(),
    ),
]
Name = Annotated[str | None, Parameter(help="Name of the run, here and in Prefect", metavar="NAME")]
Tags = Annotated[
    list[str] | None, Parameter(help="Tag of the run, here and in Prefect (repeatable)", metavar="TAG", negative=())
]
OUTPUT_OPTIONS = [
    Option(inspect.Parameter("name", KEYWORD_ONLY, default=None, annotation=Name), RESULTS),
    Option(inspect.Parameter("tag", KEYWORD_ONLY, default=None, annotation=Tags), RESULTS),
    Option(inspect.Parameter("show_output", KEYWORD_ONLY, default=False, annotation=ShowOutput), RESULTS),
    Option(inspect.Parameter("json", KEYWORD_ONLY, default=False, annotation=Json), RESULTS),
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
    own_group = model.flow_name.title()
    flow_options = _make_flow_options(model, own_group)
    isolation = inspect.Parameter("isolation", KEYWORD_ONLY, default=None, annotation=Isolation)
    env = inspect.Parameter("env", KEYWORD_ONLY, default=None, annotation=Environment)
    options = [*flow_options, Option(isolation, PROVIDERS["local"].name.title()), Option(env, SANDBOX), *action_options]
    settings_options = _make_settings_options({option.parameter.name for option in options})
    arguments = [option.parameter for option in flow_options if option.parameter.kind is not KEYWORD_ONLY]
    named = [option for option in (*options, *settings_options) if option.parameter.kind is KEYWORD_ONLY]
    parameters = [*arguments, *_arrange_options(named, own_group)]
    signature = inspect.Signature(parameters, return_annotation=int)

    def run(*positional: Any, **keywords: Any) -> int:
        words_by_option = signature.bind_partial(*positional, **keywords).arguments
        action_names = [option.parameter.name for option in action_options]
        action = make_action(**{name: words_by_option[name] for name in action_names if name in words_by_option})
        files = list(words_by_option.get("files", []))
        if "file" in words_by_option:  # the argument of a flow with one file of code
            files = [words_by_option["file"]]
        return action(model, files, _read_parameters(words_by_option, flow_options, settings_options))

    run.__name__ = model.flow_name
    run.__doc__ = FLOWS[model.flow_name]
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _read_parameters(
    words_by_option: Mapping[str, Any], flow_options: list[Option], settings_options: list[Option]
) -> dict[str, Any]:
    """Convert the words of the command line to the flow's parameters. Raises ConfigurationError or OSError."""
    values: dict[str, Any] = {}
    for option in flow_options:
        if option.parameter.name in words_by_option:
            words = words_by_option[option.parameter.name]
            values[option.target] = None if words is None else option.read(words)
    settings: dict[str, Any] = {}
    for option in settings_options:
        value = words_by_option.get(option.parameter.name)
        if value is not None:
            settings[option.parameter.name] = None if value == "none" else value
    if words_by_option.get("env"):
        settings["environment"] = read_pairs("env", words_by_option["env"])
    if settings:
        values["provider_options"] = settings
    isolation = words_by_option.get("isolation")
    if isolation is not None:
        provider = values.get("provider", "local")
        if provider != "local":
            raise ConfigurationError(
                f"--isolation needs the provider local, and --provider is {provider}: leave --isolation out"
            )
        values["provider"] = f"local:{isolation}"
    minimize, maximize = values.pop("minimize", None), values.pop("maximize", None)
    return values | _read_objectives(minimize or [], maximize or [])


def __getattr__(name: str) -> Callable[..., int]:
    """Build the command of a flow when it is first used."""
    if name not in FLOWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_flow_command(load_model(name), OUTPUT_OPTIONS, make_run_action)


def _make_flow_options(model: type[FlowParameters[Any]], own_group: str) -> list[Option]:
    """Return the arguments and the options of a flow's parameters."""
    options: list[Option] = []
    for name, parameter in build_signature(model).parameters.items():
        form = find_form(parameter.annotation)
        if name in LEFT_OUT or form.form == "hidden":
            continue
        group = GROUP_OF.get(name, own_group) if parameter.kind is KEYWORD_ONLY else own_group
        if form.form == "objectives":
            for word, text in OBJECTIVES.items():
                details = Parameter(help=_write_help(text, is_list=True), negative=(), metavar="FIELD")
                options.append(Option(_make_option(word, list[str] | None, details), group, word))
            continue
        reader = READERS.get(form.form) or WordReader(get_args(parameter.annotation)[0])
        make = _make_argument if form.is_argument else _make_parameter_option
        options.append(Option(make(parameter, form, reader), group, name, reader.read))
    return options


def _make_argument(parameter: inspect.Parameter, form: CommandLineForm, reader: WordReader) -> inspect.Parameter:
    name = {"code file": "file", "code files": "files"}.get(form.form, parameter.name)
    kind: Any = list[str] if reader.kind == list[str] else str
    default: Any = inspect.Parameter.empty
    if parameter.default is None:
        kind, default = kind | None, None
    details = Parameter(help=_write_help(form.help or _describe(parameter)), negative=())
    annotation = Annotated[kind, details]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, default=default, annotation=annotation)


def _make_parameter_option(
    parameter: inspect.Parameter, form: CommandLineForm, reader: WordReader
) -> inspect.Parameter:
    description = _describe(parameter)
    is_list = _is_list(reader.kind)
    settings: dict[str, Any] = {
        "help": _write_help(form.help or description, is_list),
        "metavar": form.metavar or reader.metavar or _name_value(parameter.name, reader.kind, description),
        "show_choices": not form.metavar,
    }
    is_off = parameter.default is False
    if is_off or parameter.default == "":
        settings["show_default"] = False
    if is_off or is_list:  # An option that is off by default needs no negative form.
        settings["negative"] = ()
    if is_list and form.form not in ("grid", "space"):  # There, the word none is an error.
        settings["converter"] = _read_words
    details = Parameter(**settings)
    default = None if parameter.default == {} else parameter.default
    return _make_option(OPTIONS_BY_PARAMETER.get(parameter.name, parameter.name), reader.kind, details, default)


def _describe(parameter: inspect.Parameter) -> str:
    field = find_field(parameter.annotation)
    return (field and field.description) or ""


def _arrange_options(options: list[Option], own_group: str) -> list[inspect.Parameter]:
    """Return the options' parameters in the order of the help, each with its group."""
    providers = [name.title() for name in PROVIDERS]
    group_names = [DEPLOYMENT, COMMON_OPTIONS, own_group, *GROUPS, *providers]
    groups = {name: Group(name, sort_key=number) for number, name in enumerate(group_names)}
    options = sorted(options, key=lambda option: group_names.index(option.group))
    common = [option for option in options if option.parameter.name in COMMON_NAMES][:MAX_COMMON_OPTIONS]
    others = [option for option in options if option not in common]
    grouped = [(option.parameter, groups[COMMON_OPTIONS]) for option in common]
    grouped += [(option.parameter, groups[option.group]) for option in others]
    return [
        parameter.replace(annotation=Annotated[parameter.annotation, Parameter(group=group)])
        for parameter, group in grouped
    ]


def _write_help(description: str, is_list: bool = False) -> str:
    """Return an option's help text: the description's first sentence."""
    sentence = description.partition(". ")[0].removesuffix(".")
    return f"{sentence} (repeatable)" if is_list else sentence


def _is_list(kind: Any) -> bool:
    """Return whether the type is a list, or a list or None."""
    return "list" in str(kind)


def _is_number(kind: Any) -> bool:
    return not {int, float}.isdisjoint((kind, *get_args(kind)))


def _name_value(name: str, kind: Any, description: str | None) -> str:
    """Return the name of an option's value in the help: a number's unit, or the last word of the option's name."""
    if _is_number(kind):
        return UNITS.get((description or "").partition(" ")[0], "N")
    word = name.rpartition("_")[2].upper()
    return word.removesuffix("S") if _is_list(kind) else word


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


def _read_models(words: Sequence[str]) -> dict[str, str]:
    """Return models by name. A word is `small=openai/gpt-4o-mini`, or the model alone, which is then its own name."""
    return read_pairs("models", [f"{word}={word}" if word and "=" not in word else word for word in words])


def _read_types(words: Sequence[str]) -> dict[str, str] | str:
    """Return the types of columns, from words such as `zip=str`. The single word json applies to all columns."""
    return "json" if words == ["json"] else read_pairs("types", re.split(r"\s*,\s*", ",".join(words)))


def _read_paths(words: Sequence[str]) -> list[str] | str | None:
    """Return one absolute path, or a list of several."""
    paths = [resolve_path(word) for word in words]
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
    "mounts": WordReader(list[str] | None, partial(read_pairs, "mounts"), "TARGET=PATH"),
    "tools": WordReader(list[str] | None, partial(read_pairs, "tools"), "NAME=MODULE:FUNCTION"),
    "models": WordReader(list[str] | None, _read_models, "NAME=MODEL"),
    "types": WordReader(list[str] | None, _read_types, "COLUMN=TYPE"),
    "grid": WordReader(list[str] | None, parse_grid, "NAME=VALUES"),
    "space": WordReader(list[str] | None, parse_space, "NAME=BOUNDS"),
}
