"""The messages, images and options that code passes to `llm_query`, as the host takes them."""

# The values are JSON or types of any kind, which only checks at run time can tell apart.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from binascii import b2a_base64

from ...wire.names import add_article
from .answer_format import AnswerFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Prompt = str | list[dict[str, Any]]

MAX_IMAGE_CHARACTERS = 3 * 1024 * 1024  # characters of the data URLs of a prompt's images
MAX_IMAGE_BYTES = MAX_IMAGE_CHARACTERS // 4 * 3  # bytes of an image
DOWNLOAD_SECONDS = 60.0  # seconds that an image's server may be silent
_IMAGE_KINDS = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8"}  # first bytes by kind


def read_options(
    name: str, response_format: Any, *, images: Any = None, **options: Any
) -> tuple[dict[str, Any], AnswerFormat | None]:
    """Return the options that are not None, as the host takes and checks them, and the format of answers."""
    answer_format = None
    if response_format is not None:
        answer_format = AnswerFormat(response_format)
        options["response_format"] = answer_format.schema
    if images is not None:
        options["images"] = read_images(name, images)
    set_options = {option: value for option, value in options.items() if value is not None}
    return set_options, answer_format


def are_lists(values: Any) -> bool:
    """Return whether the values are a list of lists."""
    return isinstance(values, (list, tuple)) and all(isinstance(value, (list, tuple)) for value in values)


def read_prompt(name: str, argument: str, prompt: Any, images: Any = None, *, takes_messages: bool = True) -> Prompt:
    """Return a prompt for the host: a text, or a list of messages.

    `argument` names the prompt in errors. Raises TypeError for other types, and the errors of `read_images`.
    """
    if isinstance(prompt, str):
        if images is None:
            return prompt
        messages: list[Any] = [{"role": "user", "content": prompt}]
    elif takes_messages and isinstance(prompt, (list, tuple)) and prompt:
        messages = [_read_message(name, f"{argument}[{i}]", message) for i, message in enumerate(prompt)]
    else:
        wanted = "text or a list of messages" if takes_messages else "text"
        raise TypeError(f"{name}: {argument} is {add_article(type(prompt).__name__)}: pass a {wanted}")
    if images is not None:
        parts = messages[-1]["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in read_images(name, images)]
        messages[-1]["content"] = parts
    return messages


def _read_message(name: str, place: str, message: Any) -> dict[str, Any]:
    """Return the role and the content of a message, with images as data URLs. The host checks the rest."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, (str, list)) or "role" not in message:
        raise TypeError(f"{name}: {place} is no message: pass a dict such as {{'role': 'user', 'content': 'text'}}")
    if isinstance(content, list):
        content = [_read_part(name, part) for part in content]
    return {"role": message["role"], "content": content}


def _read_part(name: str, part: Any) -> Any:
    if part["type"] != "image_url":
        return part
    (url,) = read_images(name, [part["image_url"]["url"]])
    return {"type": "image_url", "image_url": {**part["image_url"], "url": url}}


def read_images(name: str, images: Any) -> list[str]:
    """Return one or more images as data URLs.

    Raises TypeError for a wrong type, ValueError for a wrong format or size, and OSError if it cannot be read.
    """
    if isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike)):
        images = [images]
    urls = [_read_image(name, image) for image in images]
    if sum(map(len, urls)) > MAX_IMAGE_CHARACTERS:
        raise ValueError(
            f"{name}: the images of a prompt have more than {MAX_IMAGE_BYTES:,} bytes: make them smaller, or spread "
            "them over several prompts"
        )
    return urls


def _read_image(name: str, image: Any) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        if not image.startswith("data:image/"):
            raise ValueError(f"{name}: the data URL {image[:30]}... is no image")
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        content, source = bytes(image), "bytes"
    elif isinstance(image, (str, os.PathLike)):
        source = os.fspath(image)
        with _open_image(source) as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    else:
        raise TypeError(f"{name}: an image is {add_article(type(image).__name__)}: pass a path, bytes or a URL")
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(f"{name}: the image {source} has more than {MAX_IMAGE_BYTES:,} bytes: make it smaller")
    kind = _find_image_kind(content)
    if not kind:
        raise ValueError(f"{name}: the image {source} is not PNG, JPEG, GIF or WebP: convert it")
    return f"data:image/{kind};base64,{b2a_base64(content, newline=False).decode()}"


def _find_image_kind(content: bytes) -> str:
    """Return the kind of an image that all model servers take, such as "png", or "" for other data."""
    for kind, beginning in _IMAGE_KINDS.items():
        if content.startswith(beginning):
            return kind
    is_webp = content.startswith(b"RIFF") and content[8:12] == b"WEBP"
    return "webp" if is_webp else ""


def _open_image(source: Any) -> Any:
    """Open a file or a web address. The sandbox downloads it, so its limits on the network hold."""
    if not str(source).startswith(("http://", "https://")):
        return open(source, "rb")
    import urllib.request

    return urllib.request.urlopen(source, timeout=DOWNLOAD_SECONDS)
