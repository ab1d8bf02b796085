"""Limits on an execution's displays and its last value."""

from __future__ import annotations

from .frames import BadFrameError
from .strict_json import has_too_many_containers
from .submission import MAX_SUBMIT_DEPTH, is_deeper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_REPR_CHARACTERS = 20_000  # repr of a last value that is not JSON, and text of a display
MAX_DISPLAYS = 1_000  # displays per execution; each is a frame
MAX_DISPLAYS_BYTES = 4 * 1024 * 1024  # JSON of all displays of an execution
MAX_NOTE_BYTES = 2_000  # additional bytes per display, for a note about omitted data
MAX_TYPES = 20  # MIME types of one display
MAX_TYPE_CHARACTERS = 100


def check_bundle(bundle: Any, body: bytes) -> dict[str, Any]:
    """Validate a MIME bundle and return it; `body` is its JSON. Raises ValueError if it is invalid or too complex."""
    if type(bundle) is not dict or not 0 < len(bundle) <= MAX_TYPES:  # type: ignore[reportUnknownArgumentType]
        raise ValueError("it is not a dict of MIME types and data")
    types: dict[str, Any] = bundle  # type: ignore[reportUnknownVariableType]
    if any(len(name) > MAX_TYPE_CHARACTERS for name in types):
        raise ValueError("an invalid MIME type")
    if has_too_many_containers(types, body) or any(is_deeper(data, MAX_SUBMIT_DEPTH) for data in types.values()):
        raise ValueError("data of too many lists and dicts")
    return types


def check_displays(count: int, size: int) -> None:
    """Raise BadFrameError if our driver would not send so many displays, or so many bytes of displays."""
    if count > MAX_DISPLAYS or size > MAX_DISPLAYS_BYTES + MAX_DISPLAYS * MAX_NOTE_BYTES:
        raise BadFrameError(f"{count:,} displays of {size:,} bytes")
