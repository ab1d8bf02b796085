"""A decoder for an execution's displays and its last value.

The data is untrusted. Invalid data is ignored, because the result does not depend on it.
"""

from __future__ import annotations

from typing import Any

from ..intake.large_json import Parts, read_json
from ..wire.displays import MAX_REPR_CHARACTERS, check_bundle
from ..wire.submission import MAX_SUBMIT_DEPTH, SubmissionError
from .decoding import decode_submission

MAX_TEXT_CHARACTERS = MAX_REPR_CHARACTERS + 100  # including the note about omitted text


def decode_shown(value: bytes | None, displays: list[bytes]) -> Parts[dict[str, Any]]:
    """Return the non-empty fields of the meta: `value` or `value_repr`, and `displays`."""
    shown: dict[str, Any] = {}
    if value is not None:
        try:
            fields = yield from decode_submission(value, None)
        except SubmissionError:
            fields = {}
        text = fields.get("repr")
        if fields.get("value") is not None:
            shown["value"] = fields["value"]
        elif isinstance(text, str):
            shown["value_repr"] = text[:MAX_TEXT_CHARACTERS]
    bundles: list[dict[str, Any]] = []
    for body in displays:
        try:
            bundles.append(check_bundle((yield from read_json(body, MAX_SUBMIT_DEPTH + 1)), body))
        except (ValueError, RecursionError):
            continue
    if bundles:
        shown["displays"] = tuple(bundles)
    return shown
