"""An encoding of NaN and infinities, which JSON lacks: null as the value, and a separate dict with the numbers.

The keys of that dict are JSON pointers (RFC 6901), such as `{"/curve/3": "nan"}`.
"""

from __future__ import annotations

from .strict_json import NotJsonError, convert_fields, encode_fields, encode_in_parts, is_certainly_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
MAX_STEPS = 500  # steps of a pointer; no value from a sandbox is nested deeper


def encode_values(fields: dict[str, Any]) -> tuple[list[bytes], dict[str, str]]:
    """Return the fields as JSON in parts, and their non-finite numbers by JSON pointer. Raises NotJsonError."""
    fields = convert_fields(fields, allow_nonfinite=True)
    try:
        return encode_in_parts(fields), {}
    except (ValueError, RecursionError):
        plain, numbers = replace_nonfinite(fields)
        return [encode_fields(plain)], numbers


def replace_nonfinite(value: Any) -> tuple[Any, dict[str, str]]:
    """Return the value with None for non-finite numbers, and these numbers by JSON pointer. Raises NotJsonError."""
    numbers: dict[str, str] = {}
    try:
        if is_certainly_json(value):
            return value, numbers
        return _replace(value, "", numbers), numbers
    except RecursionError:
        raise NotJsonError("it is nested too deeply") from None


def _replace(value: Any, pointer: str, numbers: dict[str, str]) -> Any:
    """Return a copy of the value at that pointer. Build no pointer for finite numbers: there may be a million."""
    if isinstance(value, float):
        if value - value == 0:
            return value
        numbers[pointer] = repr(value)
        return None
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # type: ignore[reportUnknownArgumentType]
        for index, item in enumerate(items):
            if type(item) is float:
                if item - item != 0:
                    numbers[f"{pointer}/{index}"] = repr(item)
                    items[index] = None
            elif isinstance(item, (list, tuple, dict)):
                items[index] = _replace(item, f"{pointer}/{index}", numbers)
        return items
    if isinstance(value, dict):
        pairs: dict[str, Any] = value  # type: ignore[reportUnknownVariableType]
        return {
            key: _replace(item, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", numbers)
            if isinstance(item, (float, list, tuple, dict))
            else item
            for key, item in pairs.items()
        }
    return value


def restore_numbers(value: Any, numbers: dict[str, str]) -> None:
    """Undo `replace_nonfinite` in place. Raises ValueError if a pointer does not lead to a null."""
    for pointer, name in numbers.items():
        number = NUMBERS.get(name) if type(name) is str else None  # untrusted JSON may have other types
        steps = pointer.split("/", MAX_STEPS)
        if number is None or len(steps) < 2 or steps[0]:
            raise ValueError("a non-finite number is named by a JSON pointer, and is nan, inf or -inf")
        around = value
        for step in steps[1:-1]:
            around = around[_find_place(around, step)]
        place = _find_place(around, steps[-1])
        if around[place] is not None:
            raise ValueError("a number that is not finite is null in the JSON beside it")
        around[place] = number


def _find_place(around: Any, step: str) -> Any:
    """Return the dict key or list index that a pointer's step names. Raises ValueError if it does not exist."""
    if type(around) is dict:
        key = step.replace("~1", "/").replace("~0", "~")
        if key in around:
            return key
    elif type(around) is list and len(step) < 10 and step.isascii() and step.isdigit():
        items: Any = around  # type: ignore[reportUnknownVariableType]
        if int(step) < len(items):
            return int(step)
    raise ValueError("a JSON pointer to what is not there")
