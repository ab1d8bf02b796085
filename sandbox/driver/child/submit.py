"""The arguments of SUBMIT, encoded as JSON within a limit, and the function `report`."""

from __future__ import annotations

from ...wire.names import add_article
from ...wire.nonfinite import encode_values
from ...wire.strict_json import NotJsonError, convert_fields, dumps, encode_fields, find_loss
from ...wire.submission import MAX_SUBMIT_BYTES, MAX_SUBMIT_DEPTH, SubmissionError, check_fields, check_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Submitted(SystemExit):
    """The end of an execution that submitted. Threads and event loops let a SystemExit pass without a message."""

    __module__ = "builtins"  # the name that code sees in tracebacks


class SubmitError(ValueError):
    """A value that SUBMIT cannot return."""

    __module__ = "builtins"  # the name that code sees in tracebacks


def encode_submission(values: tuple[Any, ...], fields: dict[str, Any], expected: list[dict[str, str]] | None) -> bytes:
    """Return the JSON of SUBMIT's arguments; `expected` are the allowed fields, None allows any. Raises SubmitError."""
    names = ["output"] if expected is None else [field["name"] for field in expected]
    if len(values) > len(names):
        raise SubmitError(f"SUBMIT takes {', '.join(names)}, and was given {len(values)} positional values")
    matched = dict(zip(names, values))
    for name in fields:
        if name in matched:
            raise SubmitError(f"SUBMIT was given {name!r} by position and by name: give it once")
    matched.update(fields)
    try:
        return encode_output(matched, expected)
    except (NotJsonError, SubmissionError) as error:
        raise SubmitError(str(error)) from None


def encode_output(fields: dict[str, Any], expected: list[dict[str, str]] | None = None) -> bytes:
    """Return the JSON of fields by name: an object, or with non-finite numbers a list of it and these numbers.

    Raises NotJsonError and SubmissionError.
    """
    if expected is not None:  # DSPy and recursive models expect fields. They convert keys as JSON does.
        fields = {name: _convert_keys(value) for name, value in fields.items()}
    # An item takes at least two bytes.
    fields = convert_fields(fields, MAX_SUBMIT_BYTES // 2, allow_nonfinite=True)
    if expected is not None:
        check_fields(fields, expected)
        fields = {field["name"]: fields[field["name"]] for field in expected}
    parts, nonfinite = encode_values(fields)
    if nonfinite:
        parts = [b"[", *parts, b",", encode_fields(nonfinite), b"]"]
    body = b"".join(parts)
    check_limits(fields, body)
    return body


def _convert_keys(value: Any, depth: int = MAX_SUBMIT_DEPTH) -> Any:
    """Return the value with numbers and None as keys of dicts converted to text, as JSON has them."""
    if depth and type(value) is dict:
        items: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
        return {
            dumps(key) if key is None or type(key) in (bool, int, float) else key: _convert_keys(item, depth - 1)
            for key, item in items.items()
        }
    if depth and type(value) in (list, tuple):
        return [_convert_keys(item, depth - 1) for item in value]
    return value


def make_report(call_host: Callable[..., Any], end: Callable[[], Any]) -> Callable[[Any, Any], None]:
    """Return the function `report`; it calls `end` if the host answers that the execution must end."""

    def report(value: Any, step: Any) -> None:
        """Report the value reached at a step. End the trial as pruned if its sweep decides so.

        Args:
            value: A number.
            step: A whole number, 0 or more.

        Raises:
            TypeError: An argument is not a number.
            ValueError: `step` is not a whole number from 0 on.
        """
        number = _convert("value", value)
        place = _convert("step", step)
        if not _is_finite(place) or place < 0 or int(step) != step:
            raise ValueError(f"report: step is {step!r}: use a whole number of at least 0")
        if call_host("report", (number if _is_finite(number) else str(number), int(step)), {}):
            end()

    report.__qualname__ = "report"
    return report


def _is_finite(number: float) -> bool:
    return number - number == 0


def _convert(name: str, value: Any) -> float:
    # `float` accepts dates and durations, and drops imaginary parts.
    is_complex = getattr(getattr(value, "dtype", None), "kind", None) == "c"
    try:
        if not isinstance(value, (str, bytes)) and not is_complex and find_loss(value) is None:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"report: {name} is {add_article(type(value).__name__)}: it is a number")
