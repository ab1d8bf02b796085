"""What SUBMIT may hand back: which fields, how much and how deep. The sandbox checks it, and the host once more."""

from __future__ import annotations

from .strict_json import MAX_CONTAINERS, has_too_many_containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SUBMIT_BYTES = 1024 * 1024  # of UTF-8 that one SUBMIT may hand back
# Lists and dicts inside one another in the value of a field: what values go through later has limits of its own, each
# between 200 and 500 (pickle, copy.deepcopy, Prefect's and pydantic's walks), less the stack that is there already.
MAX_SUBMIT_DEPTH = 100


MAX_NAME_CHARACTERS = 1_000  # of a field, which are shown in every row of a table


class SubmissionError(ValueError):
    """What cannot be handed back; the message says why, and the remedy."""


def check_fields(fields: dict[str, Any], expected: list[dict[str, str]]) -> None:
    """Raises SubmissionError unless these are the fields that are expected, with the types that they name."""
    names = [field["name"] for field in expected]
    wanted = "SUBMIT takes " + ", ".join(names)
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise SubmissionError(f"{wanted}; there is no field {unknown[0]!r}")
    missing = [name for name in names if name not in fields]
    if missing:
        raise SubmissionError(f"{wanted}; missing: {', '.join(missing)}")
    kinds: dict[str, Any] = {
        "str": str, "int": int, "float": (int, float), "bool": bool, "list": (list, tuple), "dict": dict,
    }  # fmt: skip
    for field in expected:
        value, kind = fields[field["name"]], field.get("type", "")
        is_wrong_bool = isinstance(value, bool) and kind in ("int", "float")
        if kind in kinds and (is_wrong_bool or not isinstance(value, kinds[kind])):
            raise SubmissionError(f"the field {field['name']!r} must be {kind}, not {type(value).__name__}")


def check_size(body: bytes) -> None:
    """Raises SubmissionError for JSON that is too large."""
    if len(body) > MAX_SUBMIT_BYTES:
        raise SubmissionError(
            f"SUBMIT was given {len(body):,} bytes of JSON, more than the {MAX_SUBMIT_BYTES:,} that it takes: "
            "save the data to the volume with save_to_volume and submit its path"
        )


def check_names(fields: dict[str, Any]) -> None:
    """Raises SubmissionError for a field whose name is no name any more."""
    if any(len(name) > MAX_NAME_CHARACTERS for name in fields):
        raise SubmissionError(
            f"a field's name has more than {MAX_NAME_CHARACTERS:,} characters: submit the text as a value"
        )


def check_limits(fields: dict[str, Any], body: bytes) -> None:
    """Raises SubmissionError where the fields, which are that JSON, are too large, too many or nested too deeply."""
    check_size(body)
    check_names(fields)
    if has_too_many_containers(fields, body):
        raise SubmissionError(
            f"SUBMIT was given more than {MAX_CONTAINERS:,} lists and dicts: save the data to the volume with "
            "save_to_volume and submit its path"
        )
    if body.count(b"[") + body.count(b"{") > MAX_SUBMIT_DEPTH:  # or no value can be that deep
        for name, value in fields.items():
            if is_deeper(value, MAX_SUBMIT_DEPTH):
                raise SubmissionError(
                    f"{name} is nested too deeply, more than {MAX_SUBMIT_DEPTH} lists or dicts inside one another: "
                    "hand over a flat list of its parts, or its JSON as a string"
                )


def check_submission(
    value: Any, body: bytes, expected: list[dict[str, str]] | None, *, is_within_limits: bool
) -> dict[str, Any]:
    """The fields that came out of a sandbox, whose code may have written them past SUBMIT: checked as SUBMIT does.

    `body` is their JSON. `expected` are the fields that were asked for, None for any. `is_within_limits` says that
    whoever read them has counted lists and levels already. Raises SubmissionError.
    """
    if type(value) is not dict:
        raise SubmissionError("it has no fields")
    submitted: dict[str, Any] = value  # type: ignore[reportUnknownVariableType]
    if expected is not None:
        check_fields(submitted, expected)
    if is_within_limits:
        check_size(body)
        check_names(submitted)
    else:
        check_limits(submitted, body)
    return submitted


def is_deeper(value: Any, depth: int) -> bool:
    """Whether more than so many lists and dicts stand inside one another; level by level, so that no stack ends it."""
    level = [value]
    while level and depth > 0:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [part for part in item.values() if isinstance(part, (dict, list, tuple))]  # type: ignore[reportUnknownVariableType]
            elif isinstance(item, (list, tuple)):
                inner += [part for part in item if isinstance(part, (dict, list, tuple))]  # type: ignore[reportUnknownVariableType]
        depth -= 1
        level = inner
    return bool(level)
