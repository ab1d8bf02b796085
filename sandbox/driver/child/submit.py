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
    """Return the JSON of SUBMIT's arguments. `expected` lists the fields; None allows any. Raises SubmitError."""
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
    """Return the JSON of fields by name: an object, or a list of the object and its non-finite numbers.

    Raises NotJsonError if JSON cannot hold a value, and SubmissionError for wrong fields or too much data.
    """
    if expected is not None:  # DSPy and recursive models, which expect fields, want keys converted as JSON does.
        fields = {name: _convert_keys(value) for name, value in fields.items()}
    max_items = MAX_SUBMIT_BYTES // 2  # An item takes at least two bytes.
    fields = convert_fields(fields, max_items, allow_nonfinite=True)
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
    """Return a copy of the value. As in JSON, numbers, bools and None become texts where they are keys of dicts."""
    if depth and type(value) is dict:
        items: dict[Any, Any] = value  # type: ignore[reportUnknownVariableType]
        converted: dict[Any, Any] = {}
        for key, item in items.items():
            is_convertible = key is None or type(key) in (bool, int, float)
            converted[dumps(key) if is_convertible else key] = _convert_keys(item, depth - 1)
        return converted
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
        step_number = _convert("step", step)
        is_whole = _is_finite(step_number) and int(step) == step
        if not is_whole or step_number < 0:
            raise ValueError(f"report: step is {step!r}: use a whole number of at least 0")
        json_value = number if _is_finite(number) else str(number)
        must_end = call_host("report", (json_value, int(step)), {})
        if must_end:
            end()

    report.__qualname__ = "report"
    return report


def _is_finite(number: float) -> bool:
    return number - number == 0


def _convert(name: str, value: Any) -> float:
    """Return the argument `name` of `report` as a number. Raises TypeError."""
    # `float` would convert texts, dates and durations, and drop the imaginary part of a complex number of numpy.
    is_complex = getattr(getattr(value, "dtype", None), "kind", None) == "c"
    is_text = isinstance(value, (str, bytes))
    try:
        loses_parts = is_text or is_complex or find_loss(value) is not None
        if not loses_parts:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"report: {name} is {add_article(type(value).__name__)}: it is a number")
