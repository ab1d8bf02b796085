"""The conversion of Python objects to JSON: models of pydantic, dataclasses, sets, dates and others."""

import dataclasses
import json
from contextlib import suppress
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from ..wire.strict_json import is_certainly_json
from .data_frames import list_table_rows


def convert_value(value: Any) -> Any:
    """Convert a table to a list of rows, and another object like `convert_object`, with named tuples as dicts."""
    rows = list_table_rows("value", value)
    return convert_object(value, is_returned=True) if rows is None else rows


def convert_object(value: Any, *, is_returned: bool = False) -> Any:
    """Convert models and dataclasses to dicts, sets to lists, and dates, Decimals and enums to texts.

    Named tuples become dicts if `is_returned`, and otherwise lists. Raises TypeError and ValueError for other values.
    """
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    is_array = hasattr(kind, "tolist")
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
        return {_convert_key(key): convert_object(item, is_returned=is_returned) for key, item in fields.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [convert_object(item, is_returned=is_returned) for item in value]  # type: ignore[reportUnknownVariableType]
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
