"""A decoder that turns the end of an execution into a result or an error.

The data is untrusted, because code may have written it. Every value is checked before use.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import SubmitError
from ..result import Result
from ..wire.frames import EXITED
from ..wire.names import MAX_REPORTED_FILES
from ..wire.nonfinite import restore_numbers
from ..wire.submission import MAX_REPR_CHARACTERS, SubmissionError, check_bundle, check_submission
from .ending import build_error, read_json
from .text_escape import change_texts

if TYPE_CHECKING:
    from ..protocol import PendingExecution

MAX_SHOWN_CHARACTERS = MAX_REPR_CHARACTERS + 100  # text of a last value, with the note about omitted text
MAX_PEAK_KIB = 1 << 44  # largest credible memory of a process, 16 PiB
MAX_SECONDS = 1e9  # longest credible run time, 30 years; larger values did not come from our driver


def decode_end(pending: PendingExecution, header: dict[str, Any], body: bytes) -> Result:
    """Return the result in an execution's last frame, or raise the error in it."""
    meta = _decode_usage(header)
    if pending.files:
        meta["files"] = _decode_files(pending.files)
    if pending.value is not None:
        meta |= _decode_value(pending.value)
    if pending.displays:
        meta["displays"] = _decode_displays(pending.displays)
    hide = pending.protocol.sandbox.hide
    if hide is not None:
        shown = {"value", "value_repr", "displays"} & meta.keys()
        meta |= {name: change_texts(meta[name], hide) for name in shown}
    if header["status"] == "finished":
        return Result({}, pending.build_meta(**meta, exited=body == EXITED))
    if header["status"] == "submitted":
        is_pruned = pending.reports.is_pruned
        expected_fields = None if is_pruned else pending.request.output_fields
        try:
            outputs = decode_submission(body, expected_fields)
        except SubmissionError as reason:
            error = SubmitError(
                f"the code wrote an invalid result past SUBMIT: {reason}. Return values only with SUBMIT"
            )
            error.meta = pending.build_meta(**meta)
            raise error from None
        return Result(outputs, pending.build_meta(**meta, submitted=bool(outputs) or not is_pruned))
    raise build_error(pending, pending.build_meta(**meta))


def _decode_usage(header: dict[str, Any]) -> dict[str, Any]:
    """Return the meta's fields of run time, CPU seconds and peak memory, without values that are not credible."""
    seconds = header.get("seconds")
    microseconds = header.get("cpu_microseconds")
    peak_kib = header.get("peak_kib")
    usage: dict[str, Any] = {}
    if type(seconds) is float and 0 <= seconds < MAX_SECONDS:
        usage["seconds"] = seconds
    if type(microseconds) is int and 0 <= microseconds < MAX_SECONDS * 1e6:
        usage["cpu_seconds"] = microseconds / 1e6
    if type(peak_kib) is int and 0 < peak_kib < MAX_PEAK_KIB:
        usage["peak_mib"] = peak_kib * 10 // 1024 / 10
    return usage


def _decode_files(body: bytes) -> tuple[str, ...]:
    """Return the names of the files that the code wrote on the volume. Everything but strings is ignored."""
    try:
        value = read_json(body)
    except (ValueError, RecursionError):
        return ()
    names: list[Any] = value if isinstance(value, list) else []  # type: ignore[reportUnknownVariableType]
    return tuple(name for name in names[:MAX_REPORTED_FILES] if isinstance(name, str))


def decode_submission(body: bytes, expected: list[dict[str, str]] | None) -> dict[str, Any]:
    """Return the submitted fields. Raises SubmissionError."""
    try:
        value = read_json(body)
        if isinstance(value, list):  # the fields and their non-finite numbers
            fields_and_numbers: list[Any] = value  # type: ignore[reportUnknownVariableType]
            if len(fields_and_numbers) != 2 or type(fields_and_numbers[1]) is not dict:
                raise ValueError("not a list of fields and their non-finite numbers")
            value, numbers = fields_and_numbers
            restore_numbers(value, numbers)
    except (ValueError, RecursionError) as error:
        raise SubmissionError(f"it is not strict JSON ({type(error).__name__}: {str(error)[:100]})") from None
    return check_submission(value, body, expected)


def _decode_value(body: bytes) -> dict[str, Any]:
    """Return the meta's field of the last value: `value` or `value_repr`. Invalid data is ignored."""
    try:
        fields = decode_submission(body, None)
    except SubmissionError:
        return {}
    if fields.get("value") is not None:
        return {"value": fields["value"]}
    text = fields.get("repr")
    return {"value_repr": text[:MAX_SHOWN_CHARACTERS]} if isinstance(text, str) else {}


def _decode_displays(bodies: list[bytes]) -> tuple[dict[str, Any], ...]:
    """Return the displays. Invalid ones are ignored."""
    bundles: list[dict[str, Any]] = []
    for body in bodies:
        with suppress(ValueError, RecursionError):
            bundles.append(check_bundle(read_json(body), body))
    return tuple(bundles)
