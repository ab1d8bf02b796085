"""Checks of the messages and options that untrusted code sends with `llm_query`.

The driver gives users better messages. These checks hold if the code forges a call.
"""

# The values are JSON or types of any kind, which only checks at run time can tell apart.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from typing import Any

from ..wire.names import MAX_PROMPTS
from ..wire.strict_json import dumps
from .session import Message, RequestOptions

ROLES = ("system", "developer", "user", "assistant")
IMAGE_PREFIX = "data:image/"  # The host passes on no other URL: a provider's client could fetch it on this machine.
MAX_MESSAGES = 1000  # messages of one question, and parts of one message
MAX_SCHEMA_CHARACTERS = 64 * 1024  # characters of a schema as JSON
MAX_SCHEMA_PARTS = 10_000  # parts of a schema after its references are followed, as some clients do
MAX_TEMPERATURE = 2.0

Prompt = str | list[Message]


def check_prompts(prompts: Any, *, are_texts: bool = False) -> list[Prompt]:
    """Check and return prompts, which are texts or, without `are_texts`, lists of messages.

    Raises TypeError and ValueError.
    """
    if type(prompts) is not list:
        raise TypeError("prompts must be a list of texts")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(
            f"{len(prompts):,} prompts were given, and one call takes at most {MAX_PROMPTS:,}: split "
            "them over several calls"
        )
    for prompt in prompts:
        if type(prompt) is str:
            continue
        if are_texts:
            raise TypeError("prompts must be a list of texts")
        if type(prompt) is not list or not 1 <= len(prompt) <= MAX_MESSAGES:
            raise TypeError(f"prompts must be a list of texts, or of lists of 1 to {MAX_MESSAGES:,} messages")
        for message in prompt:
            if type(message) is not dict or message.keys() != {"role", "content"} or message["role"] not in ROLES:
                raise TypeError(f"a message must be a dict of a role ({', '.join(ROLES)}) and a content")
            _check_content(message["content"])
    return prompts


def read_options(
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    response_format: dict[str, Any] | None = None,
) -> RequestOptions:
    """Return the options of a request. Raises TypeError and ValueError."""
    if temperature is not None and (
        type(temperature) not in (int, float)
        or not math.isfinite(temperature)
        or not 0 <= temperature <= MAX_TEMPERATURE
    ):
        raise ValueError(f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}")
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens < 2**31):
        raise ValueError("max_tokens must be a whole number from 1 to 2147483647")
    if response_format is not None:
        _check_schema(response_format)
    return RequestOptions(temperature, max_tokens, response_format)


def build_messages(prompt: Prompt, system: str | None, images: list[str]) -> list[Message]:
    """Return the messages of one question; the images go with the last message. The arguments have been checked."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if images:
        last = messages[-1]
        content = last["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages[-1] = {
            **last,
            "content": [*parts, *({"type": "image_url", "image_url": {"url": url}} for url in images)],
        }
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def find_last_text(prompt: Prompt) -> str:
    """Return the text of a prompt, or of its last message, for records."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def check_images(images: list[str]) -> list[str]:
    """Check and return the images' URLs. Raises TypeError."""
    if type(images) is not list or any(type(url) is not str or not url.startswith(IMAGE_PREFIX) for url in images):
        raise TypeError("images must be a list of data URLs")
    return images


def _check_content(content: Any) -> None:
    if type(content) is str:
        return
    if type(content) is not list or not 1 <= len(content) <= MAX_MESSAGES:
        raise TypeError(f"a message's content must be a text or a list of 1 to {MAX_MESSAGES:,} parts")
    for part in content:
        kind = part.get("type") if type(part) is dict else None
        if kind == "text" and part.keys() == {"type", "text"} and type(part["text"]) is str:
            continue
        if kind != "image_url" or part.keys() != {"type", "image_url"} or type(part["image_url"]) is not dict:
            raise TypeError("a part of a message must be a text or an image_url")
        image = part["image_url"]
        if not image.keys() <= {"url", "detail"} or image.get("detail", "auto") not in ("auto", "low", "high"):
            raise TypeError("an image_url has a url, and a detail of auto, low or high")
        check_images([image.get("url")])


def _check_schema(schema: Any) -> None:
    """Check the size of a JSON schema, as text and with all references followed."""
    if type(schema) is not dict or schema.get("type") != "object":
        raise TypeError("response_format must be a JSON schema of an object")
    if len(dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"response_format has more than {MAX_SCHEMA_CHARACTERS:,} characters")
    definitions: dict[str, Any] = {}
    for name in ("definitions", "$defs"):
        if type(found := schema.get(name, {})) is not dict:
            raise TypeError(f"{name} in response_format must be a dict")
        definitions |= found
    waiting: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
    for count in itertools.count():
        if not waiting:
            return
        if count == MAX_SCHEMA_PARTS:
            raise ValueError(f"response_format has more than {MAX_SCHEMA_PARTS:,} parts with its references")
        part, followed = waiting.pop()
        if type(part) is dict:
            waiting += [(inner, followed) for inner in part.values()]
            name = str(part.get("$ref")).rpartition("/")[2]
            if name in definitions and name not in followed:
                waiting.append((definitions[name], followed | {name}))
        elif type(part) is list:
            waiting += [(inner, followed) for inner in part]
