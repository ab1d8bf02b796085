"""The description of a recursive query's context for its model: its shape and its beginning."""

from __future__ import annotations

from .images import IMAGE_START
from .names import add_article
from .strict_json import convert_fields, dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_INLINE_CHARACTERS = 32 * 1024  # characters of a query's context on the wire; a longer one goes through a file
PREVIEW_CHARACTERS = 1000  # characters of a context that a model sees
MAX_SHOWN_KEYS = 20  # keys of a dict that a model sees
MAX_KEY_CHARACTERS = 60  # characters of each key


def describe_context(context: Any) -> tuple[str, dict[str, Any]]:
    """Return a context as text, and its `is_json`, `shape` and `preview`. Raises NotJsonError."""
    text = context
    is_json = not isinstance(context, str)
    if is_json:
        text = dumps(convert_fields({"context": context})["context"])
    preview = text[:PREVIEW_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return text, {"is_json": is_json, "shape": describe_shape(context), "preview": preview}


def describe_shape(value: Any, depth: int = 3) -> str:
    """Return the type and size of a value. Down to `depth` levels, also describe the first item of each level."""
    if isinstance(value, str):
        if value.startswith(IMAGE_START):
            return f"an image, as a data URL of {len(value):,} characters: pass it to llm_query in images"
        return f"a str of {len(value):,} characters"
    if isinstance(value, dict):
        keys: list[Any] = list(value)  # type: ignore[reportUnknownArgumentType]
        values: list[Any] = list(value.values())  # type: ignore[reportUnknownArgumentType]
        shown_keys = [repr(key)[:MAX_KEY_CHARACTERS] for key in keys[:MAX_SHOWN_KEYS]]
        if len(keys) > MAX_SHOWN_KEYS:
            shown_keys.append("...")
        return f"a dict of {len(keys):,} keys: {', '.join(shown_keys)}{_describe_items(values, 'first value', depth)}"
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # type: ignore[reportUnknownArgumentType]
        return f"a list of {len(items):,} items{_describe_items(items, 'first', depth)}"
    return add_article(type(value).__name__)


def _describe_items(items: list[Any], name: str, depth: int) -> str:
    """Describe the first item of a list or dict, and the total size if all items are texts."""
    description = ""
    if items and depth > 0:
        description = f", the {name} is {describe_shape(items[0], depth - 1)}"
    if len(items) >= 2 and all(isinstance(item, str) for item in items):
        description += f", together they have {sum(len(item) for item in items):,} characters"
    return description
