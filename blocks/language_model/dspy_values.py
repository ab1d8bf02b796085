"""Conversion of variables and tools' results to JSON, in the way of DSPy's own interpreters."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dspy.primitives.code_interpreter import CodeInterpreterError
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ...sandbox.wire.strict_json import NotJsonError, convert_fields, is_certainly_json


def convert_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Convert variables to JSON: models and dataclasses to dicts, tuples and sets to lists, dates and enums to texts.

    A set's items are sorted if they can be compared. Raises CodeInterpreterError for other values.
    """
    try:
        return {name: _convert(value, name) for name, value in variables.items()}
    except RecursionError:
        raise CodeInterpreterError("a variable contains itself, or is nested too deeply") from None


def convert_returned(value: Any) -> Any:
    """Convert a tool's result to JSON like variables, with named tuples as dicts.

    If JSON cannot hold a part of the result, such as NaN, the whole result becomes its `str`. Raises
    CodeInterpreterError for a pydantic model that cannot be serialized.
    """
    try:
        converted = _convert(value, "value", is_returned=True)
        return convert_fields({"value": converted})["value"]
    except (_NoJsonError, NotJsonError, RecursionError):
        return str(value)


class _NoJsonError(CodeInterpreterError):
    """An error for a value that cannot be converted to JSON."""


def _convert(value: Any, place: str, *, is_returned: bool = False) -> Any:
    if is_certainly_json(value) or isinstance(value, (str, int, float)) or hasattr(type(value), "tolist"):  # arrays
        return value
    if isinstance(value, BaseModel):
        try:
            return _convert(value.model_dump(mode="json"), place, is_returned=is_returned)
        except PydanticSerializationError as error:
            name = type(value).__name__
            raise CodeInterpreterError(f"Unable to serialize {name} as JSON ({place}): {error}") from error
    if isinstance(value, dict):
        items: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
        return {
            _convert_key(key, place): _convert(item, f"{place}[{key!r}]", is_returned=is_returned)
            for key, item in items.items()
        }
    if is_returned and isinstance(value, tuple) and hasattr(value, "_asdict"):  # type: ignore[reportUnknownArgumentType]
        named: Any = value  # type: ignore[reportUnknownVariableType]
        return _convert(named._asdict(), place, is_returned=True)
    if isinstance(value, (list, tuple)):
        return [_convert(item, place, is_returned=is_returned) for item in value]  # type: ignore[reportUnknownVariableType]
    if isinstance(value, (set, frozenset)):
        converted = [_convert(item, place, is_returned=is_returned) for item in value]  # type: ignore[reportUnknownVariableType]
        try:
            return sorted(converted)
        except TypeError:
            return converted
    try:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return _convert(fields, place, is_returned=is_returned)
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError) as error:
        raise _NoJsonError(
            f"Unsupported value type: {type(value).__name__} ({place}) is not JSON. Hand over numbers, text, lists and "
            "dicts"
        ) from error


def _convert_key(key: Any, place: str) -> str:
    """Return a key as JSON requires it: a number or None becomes its JSON text."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (int, float)):
        return json.dumps(key)
    raise _NoJsonError(f"Unsupported key type: {type(key).__name__} ({place}) is not JSON. Use texts for keys")
