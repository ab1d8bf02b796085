"""Readable text from a server's error response, in JSON or HTML."""

import json
import re
from typing import Any, cast

MAX_LENGTH = 20_000  # characters of a response to search
# JSON fields that may hold the message, in order: Daytona and other JavaScript servers, FastAPI, Prefect, others.
FIELDS = (("message",), ("msg",), ("exception_message", "exception_detail"), ("detail",), ("error",), ("errors",))


def extract_message(text: str) -> str:
    """Return the text with its JSON object replaced by the object's message, or the title of an HTML page.

    Truncated JSON stays unchanged.
    """
    text = text[:MAX_LENGTH]
    title = re.search(r"<title>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    if title is not None:
        return title[1].strip()
    start = text.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError, IndexError):
        return text.strip()
    return f"{text[:start]}{_find_words(value)}{text[end:]}".strip()


def describe_server_error(error: Exception) -> str:
    """Return the status and the server's message without its JSON, or the client's error if there was no response."""
    response = getattr(error, "response", None)
    if response is None:
        return str(error).partition("\n")[0] or type(error).__name__
    status, words = f"{response.status_code} {response.reason_phrase}", extract_message(response.text)
    return f"{status}: {' '.join(words.split())[:1000]}" if words else status


def _find_words(value: Any) -> str:
    """Return the message in a JSON value: its text, its items' messages, or the first field that has a message."""
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
            # FastAPI names the refused parameter in `loc`.
            place = cast("list[Any]", fields["loc"]) if isinstance(fields.get("loc"), list) else []
            return f"{'.'.join(map(str, place))}: {words}" if place else words
    return ""
