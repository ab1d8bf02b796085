"""Conversion of variables and tools' results to JSON, in the way of DSPy's own interpreters."""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dspy.primitives.code_interpreter import CodeInterpreterError
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ...sandbox.wire.strict_json import NotJsonError, convert_fields, is_certainly_json

CONVERSION_ERRORS = (PydanticSerializationError, NotJsonError, TypeError, ValueError, RecursionError)


def convert_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Convert variables to JSON: models and dataclasses to dicts, tuples and sets to lists, dates and enums to texts.

    A set's items are sorted if they can be compared. Raises CodeInterpreterError for other values.
    """
    converted: dict[str, Any] = {}
    for name, value in variables.items():
        try:
            converted[name] = _convert(value)
        except CONVERSION_ERRORS as error:
            raise CodeInterpreterError(f"Unsupported variable {name}: {error}") from error
    return converted


def convert_returned(value: Any) -> Any:
    """Convert a tool's result to JSON like variables, with named tuples as dicts.

    If JSON cannot hold a part of the result, such as NaN, the whole result becomes its `str`.
    """
    try:
        return convert_fields({"value": _convert(value, is_returned=True)})["value"]
    except CONVERSION_ERRORS:
        return str(value)


def _convert(value: Any, *, is_returned: bool = False) -> Any:
    is_array = hasattr(type(value), "tolist")
    if is_array or isinstance(value, (str, int, float)) or is_certainly_json(value):
        return value
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")  # A `RootModel` may become something else than a dict.
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif is_returned and isinstance(value, tuple) and hasattr(value, "_asdict"):  # type: ignore[reportUnknownArgumentType]
        value = value._asdict()  # type: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    if isinstance(value, dict):
        fields: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
        return {_convert_key(key): _convert(item, is_returned=is_returned) for key, item in fields.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_convert(item, is_returned=is_returned) for item in value]  # type: ignore[reportUnknownVariableType]
        if isinstance(value, (set, frozenset)):
            with suppress(TypeError):  # Some items cannot be compared.
                items.sort()
        return items
    return to_jsonable_python(value)


def _convert_key(key: Any) -> str:
    """Return a key as JSON requires it: a number or None becomes its JSON text."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (int, float)):
        return json.dumps(key)
    raise TypeError(f"a key is a {type(key).__name__}: use texts for keys")
