"""Limits on submitted fields, displays and last values. The sandbox and the host both check them."""

from __future__ import annotations

from .frames import BadFrameError
from .strict_json import MAX_CONTAINERS, has_too_many_containers, walk_levels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SUBMIT_BYTES = 1024 * 1024  # UTF-8 JSON of one SUBMIT
OTHER_WAYS = (
    "write the data to a file that `collect` returns, or save it to the volume with save_to_volume, and submit its path"
)
# Nested lists and dicts in the value of a field. Later steps (pickle, copy.deepcopy, Prefect's and pydantic's walks)
# fail between 200 and 500 levels, or at fewer levels if the stack is already deep.
MAX_SUBMIT_DEPTH = 100
MAX_REPR_CHARACTERS = 20_000  # repr of a last value that is not JSON, and text of a display
MAX_DISPLAYS = 1_000  # displays per execution; each is a frame
MAX_DISPLAYS_BYTES = 4 * 1024 * 1024  # JSON of all displays of an execution
MAX_NOTE_BYTES = 2_000  # additional bytes per display, for a note about omitted data
MAX_TYPES = 20  # MIME types of one display
MAX_TYPE_CHARACTERS = 100


class SubmissionError(ValueError):
    """Submitted fields that are refused; the message says why and names a remedy."""


def check_fields(fields: dict[str, Any], expected: list[dict[str, str]]) -> None:
    """Raise SubmissionError unless the fields have the expected names and types."""
    names = [field["name"] for field in expected]
    usage = "SUBMIT takes " + ", ".join(names)
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise SubmissionError(f"{usage}; it has no field {unknown[0]!r}")
    missing = [name for name in names if name not in fields]
    if missing:
        raise SubmissionError(f"{usage}; missing: {', '.join(missing)}")
    classes: dict[str, Any] = {
        "str": str, "int": int, "float": (int, float), "bool": bool, "list": (list, tuple), "dict": dict,
    }  # fmt: skip
    for field in expected:
        name = field["name"]
        value = fields[name]
        type_name = field.get("type", "")
        if type_name not in classes:
            continue
        is_wrong_bool = isinstance(value, bool) and type_name in ("int", "float")  # A bool is an int in Python.
        if is_wrong_bool or not isinstance(value, classes[type_name]):
            raise SubmissionError(f"the field {name!r} must be {type_name}, not {type(value).__name__}")


def check_limits(fields: dict[str, Any], body: bytes) -> None:
    """Raise SubmissionError if the fields are too large, too many or nested too deeply; `body` is their JSON."""
    if len(body) > MAX_SUBMIT_BYTES:
        raise SubmissionError(
            f"SUBMIT was given {len(body):,} bytes of JSON, and takes at most {MAX_SUBMIT_BYTES:,}: {OTHER_WAYS}"
        )
    if has_too_many_containers(fields, body):
        raise SubmissionError(f"SUBMIT was given more than {MAX_CONTAINERS:,} lists and dicts: {OTHER_WAYS}")
    if body.count(b"[") + body.count(b"{") > MAX_SUBMIT_DEPTH:  # a value with fewer brackets cannot be too deep
        for name, value in fields.items():
            if is_deeper(value, MAX_SUBMIT_DEPTH):
                raise SubmissionError(
                    f"{name} is nested more than {MAX_SUBMIT_DEPTH} levels deep: submit a flat list of "
                    "its parts, or its JSON as a string"
                )


def check_submission(value: Any, body: bytes, expected: list[dict[str, str]] | None) -> dict[str, Any]:
    """Validate fields from a sandbox and return them. Code may have written them without SUBMIT and its checks.

    `body` is their JSON. `expected` lists the expected fields; None allows any. Raises SubmissionError.
    """
    if type(value) is not dict:
        raise SubmissionError("it has no fields")
    submitted: dict[str, Any] = value  # type: ignore[reportUnknownVariableType]
    if expected is not None:
        check_fields(submitted, expected)
    check_limits(submitted, body)
    return submitted


def is_deeper(value: Any, depth: int) -> bool:
    """Return True if lists and dicts are nested deeper than `depth`."""
    return any(number > depth for number, _ in enumerate(walk_levels(value), 1))


def check_bundle(bundle: Any, body: bytes) -> dict[str, Any]:
    """Validate a MIME bundle and return it; `body` is its JSON. Raises ValueError if it is invalid or too complex."""
    if type(bundle) is not dict or not 0 < len(bundle) <= MAX_TYPES:  # type: ignore[reportUnknownArgumentType]
        raise ValueError("it is not a dict of MIME types and data")
    types: dict[str, Any] = bundle  # type: ignore[reportUnknownVariableType]
    if any(len(name) > MAX_TYPE_CHARACTERS for name in types):
        raise ValueError("an invalid MIME type")
    is_too_deep = any(is_deeper(data, MAX_SUBMIT_DEPTH) for data in types.values())
    if is_too_deep or has_too_many_containers(types, body):
        raise ValueError("data of too many lists and dicts")
    return types


def check_displays(count: int, size: int) -> None:
    """Raise BadFrameError for more displays, or more bytes of displays, than our driver sends."""
    if count > MAX_DISPLAYS or size > MAX_DISPLAYS_BYTES + MAX_DISPLAYS * MAX_NOTE_BYTES:
        raise BadFrameError(f"{count:,} displays of {size:,} bytes")
