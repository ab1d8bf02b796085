"""The description of a recursive query's context: its JSON or text, its shape, and its beginning."""

from __future__ import annotations

from .strict_json import convert_fields, dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_INLINE_CHARACTERS = 32 * 1024  # characters of a query's context on the wire; a longer one goes through a file
PREVIEW_CHARACTERS = 1000  # characters of a context that a model sees
NAMED_KEYS, NAME_CHARACTERS = 20, 60  # keys of a dict that a model sees, and characters of each


def describe_context(context: Any) -> tuple[str, dict[str, Any]]:
    """Return a context as text, and its `is_json`, `shape` and `preview`. Raises NotJsonError."""
    is_json = not isinstance(context, str)
    text = dumps(convert_fields({"context": context})["context"]) if is_json else context
    preview = text[:PREVIEW_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return text, {"is_json": is_json, "shape": describe_shape(context), "preview": preview}


def describe_shape(value: Any, depth: int = 3) -> str:
    """Return the type of a value and its size, and the same of first items down to that depth."""
    if isinstance(value, str):
        return f"a str of {len(value):,} characters"
    if isinstance(value, dict):
        keys: list[Any] = list(value)  # type: ignore[reportUnknownArgumentType]
        names = [repr(key)[:NAME_CHARACTERS] for key in keys[:NAMED_KEYS]]
        values: list[Any] = list(value.values())  # type: ignore[reportUnknownArgumentType]
        named = f"a dict of {len(keys):,} keys: {', '.join(names)}{', ...' if len(keys) > NAMED_KEYS else ''}"
        return named + _describe_items(values, "first value", depth)
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # type: ignore[reportUnknownArgumentType]
        return f"a list of {len(items):,} items{_describe_items(items, 'first', depth)}"
    return f"a {type(value).__name__}"


def _describe_items(items: list[Any], name: str, depth: int) -> str:
    first = f", the {name} is {describe_shape(items[0], depth - 1)}" if items and depth else ""
    if len(items) < 2 or any(not isinstance(item, str) for item in items):
        return first
    return f"{first}, together they have {sum(map(len, items)):,} characters"
