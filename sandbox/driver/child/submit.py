"""What SUBMIT takes: fields by name or by position, as JSON, within a limit."""

from __future__ import annotations

from ...wire.strict_json import NotJsonError, encode_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SUBMIT_BYTES = 1024 * 1024  # of UTF-8 that one SUBMIT may hand back


class Submitted(SystemExit):
    """Ends an execution whose value has been recorded. A SystemExit, which threads and event loops let pass quietly."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


class SubmitError(ValueError):
    """SUBMIT was given something that cannot be handed back."""

    __module__ = "builtins"  # tracebacks name it as the code knows it


def encode_submission(values: tuple[Any, ...], fields: dict[str, Any], expected: list[dict[str, str]] | None) -> bytes:
    """The JSON of what SUBMIT was called with; `expected` are the fields that it takes, None for any.

    Raises SubmitError.
    """
    if expected is not None:
        fields = _match_fields(values, fields, expected)
    elif len(values) > 1:
        raise SubmitError(f"SUBMIT takes one positional value, or fields by name; it was given {len(values)}")
    elif values:
        if "output" in fields:
            raise SubmitError("SUBMIT was given 'output' twice, by position and by name")
        fields = {"output": values[0], **fields}
    try:
        body = encode_fields(fields)
    except NotJsonError as error:
        raise SubmitError(str(error)) from None
    if len(body) > MAX_SUBMIT_BYTES:
        raise SubmitError(
            f"SUBMIT was given {len(body):,} bytes of JSON, more than the {MAX_SUBMIT_BYTES:,} that it takes: "
            "save the data to the volume with save_to_volume and submit its path"
        )
    return body


def _match_fields(values: tuple[Any, ...], fields: dict[str, Any], expected: list[dict[str, str]]) -> dict[str, Any]:
    names = [field["name"] for field in expected]
    wanted = "SUBMIT takes " + ", ".join(names)
    if len(values) > len(names):
        raise SubmitError(f"{wanted}; it was given {len(values)} positional values")
    matched = dict(zip(names, values))
    for name, value in fields.items():
        if name not in names:
            raise SubmitError(f"{wanted}; there is no field {name!r}")
        if name in matched:
            raise SubmitError(f"SUBMIT was given {name!r} twice, by position and by name")
        matched[name] = value
    missing = [name for name in names if name not in matched]
    if missing:
        raise SubmitError(f"{wanted}; missing: {', '.join(missing)}")
    kinds: dict[str, Any] = {
        "str": str, "int": int, "float": (int, float), "bool": bool, "list": (list, tuple), "dict": dict,
    }  # fmt: skip
    for field in expected:
        value, kind = matched[field["name"]], field.get("type", "")
        is_wrong_bool = isinstance(value, bool) and kind in ("int", "float")
        if kind in kinds and (is_wrong_bool or not isinstance(value, kinds[kind])):
            raise SubmitError(f"the field {field['name']!r} must be {kind}, not {type(value).__name__}")
    return {name: matched[name] for name in names}
