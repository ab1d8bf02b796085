"""The words of an answer that is an error: what a server says in JSON or on a page, as text for people."""

import json
import re
from typing import Any, cast

MAX_LENGTH = 20_000  # characters of a body that are looked at
# Where the words are, the first that has some: Daytona and other servers in JavaScript, FastAPI, Prefect, and the rest.
FIELDS = (("message",), ("msg",), ("exception_message", "exception_detail"), ("detail",), ("error",), ("errors",))


def extract_message(text: str) -> str:
    """The text with the words of each JSON object in it in that object's place, and of a page its title.

    An object that has no words is left out. JSON that is cut off, or is no object, stays as it is.
    """
    text = text[:MAX_LENGTH]
    title = re.search(r"<title>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    if title is not None:
        return title[1].strip()
    parts: list[str] = []
    end, decoder = 0, json.JSONDecoder()
    for brace in re.finditer(r"\{|\[(?=\s*\{)", text):
        if brace.start() < end:
            continue
        try:
            value, after = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        parts += [text[end : brace.start()], _find_words(value)]
        end = after
    return "".join([*parts, text[end:]]).strip()


def _find_words(value: Any) -> str:
    """The words of a value of JSON: its own, those of a list's items, those of the first field that has some."""
    if isinstance(value, str):
        return extract_message(value)
    if isinstance(value, list):
        return "; ".join(filter(None, map(_find_words, cast("list[Any]", value))))
    if not isinstance(value, dict):
        return ""
    fields = cast("dict[str, Any]", value)
    for names in FIELDS:
        words = ": ".join(filter(None, (_find_words(fields.get(name)) for name in names)))
        if words:
            # A field that was refused, as FastAPI says it.
            place = cast("list[Any]", fields["loc"]) if isinstance(fields.get("loc"), list) else []
            return f"{'.'.join(map(str, place))}: {words}" if place else words
    return ""
