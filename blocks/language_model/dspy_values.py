"""Conversion of variables and tools' results to JSON, in the way of DSPy's own interpreters."""

from collections.abc import Mapping
from typing import Any

from dspy.primitives.code_interpreter import CodeInterpreterError
from pydantic_core import PydanticSerializationError

from ...sandbox.requests.object_values import convert_object
from ...sandbox.wire.strict_json import NotJsonError, convert_fields

CONVERSION_ERRORS = (PydanticSerializationError, NotJsonError, TypeError, ValueError, RecursionError)


def convert_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Convert variables to JSON: models and dataclasses to dicts, tuples and sets to lists, dates and enums to texts.

    A set's items are sorted if they can be compared. Raises CodeInterpreterError for other values.
    """
    converted: dict[str, Any] = {}
    for name, value in variables.items():
        try:
            converted[name] = convert_object(value)
        except CONVERSION_ERRORS as error:
            raise CodeInterpreterError(f"Unsupported variable {name}: {error}") from error
    return converted


def convert_returned(value: Any) -> Any:
    """Convert a tool's result to JSON like variables, with named tuples as dicts.

    If JSON cannot hold a part of the result, such as NaN, the whole result becomes its `str`.
    """
    try:
        return convert_fields({"value": convert_object(value, is_returned=True)})["value"]
    except CONVERSION_ERRORS:
        return str(value)
