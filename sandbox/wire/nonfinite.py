"""An encoding of NaN and infinities, which JSON lacks: null as the value, and the numbers in a separate dict.

The keys of that dict are JSON pointers (RFC 6901), as in `{"/curve/3": "nan"}`.
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
    """Return a copy of the value at that pointer, and add its non-finite numbers to `numbers`.

    Pointers of finite numbers are never built, because there may be a million.
    """
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
        fields: dict[str, Any] = dict(value)  # type: ignore[reportUnknownArgumentType]
        for key, item in fields.items():
            if isinstance(item, (float, list, tuple, dict)):
                escaped_key = key.replace("~", "~0").replace("/", "~1")
                fields[key] = _replace(item, f"{pointer}/{escaped_key}", numbers)
        return fields
    return value


def restore_numbers(value: Any, numbers: dict[str, str]) -> None:
    """Undo `replace_nonfinite` in place. Raises ValueError if a pointer does not lead to a null."""
    for pointer, name in numbers.items():
        number = NUMBERS.get(name) if type(name) is str else None  # Untrusted JSON may have other types.
        if number is None or not pointer.startswith("/"):
            raise ValueError("a non-finite number is named by a JSON pointer, and is nan, inf or -inf")
        *outer_steps, last_step = pointer.split("/", MAX_STEPS)[1:]
        container = value
        for step in outer_steps:
            container = container[_find_key(container, step)]
        key = _find_key(container, last_step)
        if container[key] is not None:
            raise ValueError("a number that is not finite is null in the JSON beside it")
        container[key] = number


def _find_key(container: Any, step: str) -> Any:
    """Return the dict key or list index that a pointer's step names. Raises ValueError if it does not exist."""
    is_index = len(step) < 10 and step.isascii() and step.isdigit()
    if type(container) is dict:
        key = step.replace("~1", "/").replace("~0", "~")
        if key in container:
            return key
    elif type(container) is list and is_index:
        items: Any = container  # type: ignore[reportUnknownVariableType]
        if int(step) < len(items):
            return int(step)
    raise ValueError("a JSON pointer to what is not there")
