"""The function `report`, with which code in a sandbox reports its progress."""

from __future__ import annotations

from ...wire.names import add_article
from ...wire.strict_json import find_loss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    CallHost = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


def make_report(call_host: CallHost, end: Callable[[], Any]) -> Callable[[Any, Any], None]:
    """Return the function `report`; it calls `end` if the host answers that the execution must end."""

    def report(value: Any, step: Any) -> None:
        """Report the value reached at a step. End the trial as pruned if its sweep decides so.

        Args:
            value: A number.
            step: A whole number, 0 or more.

        Raises:
            TypeError: An argument is not a number.
            ValueError: `step` is not a whole number from 0 on, or a number is too large.
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
    if isinstance(value, (str, bytes)) or is_complex or find_loss(value) is not None:
        raise TypeError(f"report: {name} is {add_article(type(value).__name__)}: it is a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"report: {name} is too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"report: {name} is {add_article(type(value).__name__)}: it is a number") from None
