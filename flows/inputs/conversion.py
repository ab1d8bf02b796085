"""Parameters as Python callers have them, made what Prefect takes: arrays, generators, paths and blocks as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...blocks.host_files.mounts import locate_mounts
from ...blocks.host_files.python_path import locate_directories
from ...blocks.registry import name_provider
from ...sandbox.errors import ConfigurationError
from ...sandbox.intake.collected_files import check_patterns
from ...sandbox.requests.function_code import convert_code
from ...sandbox.wire.strict_json import NotJsonError, convert_fields
from ...tasks.host_tools import name_tools
from .readers import normalize_chunk_ids
from .spilling import check_codes

# Parameters that hold values for code, and those that hold code itself.
VALUES = ("code", "steps", "inputs", "points", "grid", "space", "data", "chunks")
CODE = ("code", "steps", "reduce", "prepare")
LISTS_OF_DICTS = ("inputs", "points")
DICTS = ("grid", "space", "chunks")
NUMBERS = ("['low']", "['high']", "['step']")  # Numbers in the definition of a space.

# The types of parameters. Type checkers see the values that callers may pass. At run time Prefect's checks, schemas and
# forms see the converted values.
if TYPE_CHECKING:
    from ...blocks.provider import SandboxProvider

    T = TypeVar("T")

    class Array(Protocol):
        """An array of numpy, pandas or `array`."""

        def tolist(self) -> Any: ...

    Items = Sequence[T] | Iterator[T] | Array
    Code = str | Callable[..., object]  # A function's source is sent.
    # `object`, because mypy infers list[object] for [{"x": 1}, {"x": "one"}], and dict[str, object] for a grid whose
    # values have different types.
    Variables = object
    GridValues = Mapping[str, object]
    SpaceValues = Mapping[str, object] | Sequence[Mapping[str, object]]
    DataById = Mapping[Any, object]
    ToolsByName = Mapping[str, str | Callable[..., Any]]
    PathText = str | PurePath
    ProviderText = str | SandboxProvider

else:
    Items, Variables, Code, PathText, ProviderText = list, dict[str, Any], str, str, str
    GridValues, DataById, ToolsByName = dict[str, list[Any]], dict[str, Any], dict[str, str]
    SpaceValues = dict[str, Any] | list[dict[str, Any]]


def convert_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Convert generators and arrays to lists, and paths, blocks and functions to text.

    Raises:
        ConfigurationError: JSON cannot hold a value, a directory is missing, a block must be saved first, code is the
            name of a file, or a function cannot be sent.
    """
    converted: dict[str, Any] = {
        name: str(value) if isinstance(value, PurePath) else value for name, value in parameters.items()
    }
    if not isinstance(provider := converted.get("provider", ""), str) and hasattr(provider, "provider_name"):
        text, options = name_provider(provider, converted.get("provider_options"))
        converted |= {"provider": text, **({} if options is None else {"provider_options": options})}
    if isinstance(paths := converted.get("python_path"), (list, tuple)):
        converted["python_path"] = [str(path) for path in locate_directories(paths)]
    if isinstance(mounts := converted.get("mounts"), Mapping):
        converted["mounts"] = {target: str(source) for target, source in locate_mounts(mounts).items()}
    if isinstance(tools := converted.get("tools"), Mapping):
        converted["tools"] = tools = name_tools(tools)  # type: ignore[reportUnknownArgumentType]
    if isinstance(collect := converted.get("collect"), (list, tuple)):
        converted["collect"] = check_patterns(collect)  # type: ignore[reportUnknownArgumentType]
    for name in CODE:
        if name in converted:
            converted[name] = _convert_functions(name, converted[name], tools or ())
    for name in VALUES:
        if name in converted:
            converted[name] = _convert_values(name, converted[name])
    if isinstance(chunks := converted.get("chunks"), dict):
        converted["chunks"] = normalize_chunk_ids(chunks)  # type: ignore[reportUnknownArgumentType]
    for name in CODE:
        check_codes(name, converted.get(name))
    return converted


def _convert_functions(name: str, value: Any, tools: Collection[str]) -> Any:
    """Convert a function, or each function in a list, to text. Raises ConfigurationError."""
    value = _list_items(value)
    if name == "prepare" and callable(value):
        raise ConfigurationError(
            "prepare is text: what executions find are its global names, and a function's are its own. Pass the lines "
            "themselves"
        )
    if isinstance(value, list):
        return [convert_code(item, tools) for item in value]  # type: ignore[reportUnknownVariableType]
    return convert_code(value, tools)


def _convert_values(name: str, value: Any) -> Any:
    def convert(field: str, value: Any) -> Any:
        def expect(place: str, value: Any) -> str | None:
            return _name_shape(name, field, place, value)

        return convert_fields({field: _list_items(value)}, allow_nonfinite=True, expect=expect)[field]

    if value is None or isinstance(value, str):  # the path of a file
        return value
    try:
        if isinstance(value, dict) and name in DICTS:  # a chunk's id may be a number, and a grid's values any list
            values: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
            places = {key: f"{name}[{key!r}]" for key in values}
            return {key: convert(places[key], item) for key, item in values.items()}
        return convert(name, value)
    except NotJsonError as error:
        raise ConfigurationError(str(error)) from None


def _name_shape(name: str, field: str, place: str, value: Any) -> str | None:
    """Return what a value at a place of a parameter has to be; None for one that is it, and where any may stand.

    Args:
        name: The parameter.
        field: What of the parameter is converted: its name, or a place of a dict in it, such as `grid['x']`.
        place: Where the value is, such as `space['x']['low']`.
        value: A value as JSON; None is never it.
    """
    if place == name in LISTS_OF_DICTS:
        others = (list, tuple, str, int, float, type(None))
        is_table = isinstance(value, list) and not any(isinstance(row, others) for row in value)  # type: ignore[reportUnknownVariableType]
        return None if is_table else "a list of dicts"
    if place == name in ("grid", "chunks"):
        return None if isinstance(value, dict) else f"a dict of {'lists' if name == 'grid' else 'data by id'}"
    if place == name == "data" or (place == field and name == "grid"):
        return None if isinstance(value, list) else "a list"
    if name == "space" and place.endswith(NUMBERS):
        return None if isinstance(value, (int, float)) else "a number"
    return None


def _list_items(value: Any) -> Any:
    """Convert a generator, a range or a tuple to a list, and return any other value unchanged."""
    return list(value) if isinstance(value, (Iterator, range, tuple)) else value  # type: ignore[reportUnknownArgumentType]
