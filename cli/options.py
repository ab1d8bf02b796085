"""The options of commands that run a flow, made from the parameters that flows share: flows/parameters.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Parameter
from pydantic import TypeAdapter, ValidationError

from ..flows.parameters import Options, field_of
from ..sandbox.errors import ConfigurationError
from .argument_parsing import build_provider, resolve_path

OPTION_NAMES = {"cache_results": "resume"}  # where an option is not called as its parameter
LEFT_OUT = ("on_failure",)  # parameters without an option: what failed is printed, and the exit status tells of it

Isolation = Annotated[
    Literal["bubblewrap", "landlock", "none"] | None,
    Parameter(help="For the local provider: insist on one level. none runs code with no isolation."),
]


def add_flow_options(shared: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command an option for each shared parameter of its flow, with the same default, bounds and description.

    `shared` is a TypedDict of flows/parameters.py. The command is called with the parameters that were asked for, in
    the place of its `**parameters`.
    """
    hints = get_type_hints(shared, include_extras=True)
    types = get_type_hints(shared)
    order = [item.name for item in fields(Options)]
    names = {name: OPTION_NAMES.get(name, name) for name in sorted(hints, key=order.index) if name not in LEFT_OUT}

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*arguments: Any, isolation: Any = None, **options: Any) -> int:
            given = {name: options.pop(option) for name, option in names.items() if option in options}
            if isolation is not None:
                given["provider"] = build_provider(given.get("provider", "local"), isolation)
            if "results_path" in given:
                given["results_path"] = resolve_path(given["results_path"])
            check_values(hints, given)
            return command(*arguments, **options, **given)

        annotations = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=annotations[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        added = [_make_option(option, types[name], hints[name]) for name, option in names.items()]
        added.append(inspect.Parameter("isolation", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Isolation))
        run.__signature__ = inspect.Signature([*own, *added], return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
        return run

    return decorate


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


def _make_option(name: str, kind: Any, hint: Any) -> inspect.Parameter:
    field = field_of(hint)
    assert field is not None
    negative = () if field.default is False else None  # nobody asks for what is not done anyway
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind, Parameter(help=f"{field.description}.", negative=negative)],
    )
