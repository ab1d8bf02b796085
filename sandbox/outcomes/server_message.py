"""Readable text from a server's error response, in JSON or HTML."""

import json
import re
from typing import Any, cast

MAX_LENGTH = 20_000  # characters of a response to search
# JSON fields that may hold the message, in order: Daytona and other JavaScript servers, FastAPI, Prefect, others.
FIELDS = (("message",), ("msg",), ("exception_message", "exception_detail"), ("detail",), ("error",), ("errors",))


def extract_message(text: str) -> str:
    """Return the title of an HTML page, or else the text with the message of its JSON object in the object's place.

    A text with truncated JSON is returned as it is.
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
    return f"{text[:start]}{_find_message(value)}{text[end:]}".strip()


def describe_server_error(error: Exception) -> str:
    """Return the status and the server's message, or the client's error if there was no response."""
    response = getattr(error, "response", None)
    if response is None:
        return str(error).partition("\n")[0] or type(error).__name__
    status = f"{response.status_code} {response.reason_phrase}"
    message = extract_message(response.text)
    return f"{status}: {' '.join(message.split())[:1000]}" if message else status


def _find_message(value: Any) -> str:
    """Return the message in a JSON value: its text, its items' messages, or the first field that has a message."""
    if isinstance(value, str):
        return extract_message(value)
    if isinstance(value, list):
        return _join_messages(cast("list[Any]", value), "; ")
    if not isinstance(value, dict):
        return ""
    fields = cast("dict[str, Any]", value)
    for names in FIELDS:
        message = _join_messages([fields.get(name) for name in names], ": ")
        if not message:
            continue
        if isinstance(fields.get("loc"), list) and fields["loc"]:  # FastAPI's place of it, as in ["body", "name"]
            return f"{'.'.join(map(str, fields['loc']))}: {message}"
        return message
    return ""


def _join_messages(values: list[Any], separator: str) -> str:
    messages = [_find_message(value) for value in values]
    return separator.join(message for message in messages if message)
