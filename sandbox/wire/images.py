"""Images as data URLs, which models take."""

from __future__ import annotations

from binascii import b2a_base64

IMAGE_START = "data:image/"  # A data URL of an image begins so.
_KINDS = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8"}  # first bytes by kind


def build_image_url(content: bytes) -> str:
    """Return the data URL of an image in PNG, JPEG, GIF or WebP, or an empty text for other data."""
    kind = next((kind for kind, beginning in _KINDS.items() if content.startswith(beginning)), "")
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        kind = "webp"
    return f"{IMAGE_START}{kind};base64,{b2a_base64(content, newline=False).decode()}" if kind else ""
