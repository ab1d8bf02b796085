"""A search space: the values that each variable may have, as JSON. An error in it is reported in one sentence."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.requests.execution_request import check_variable_name

KEYWORDS = ("low", "high", "log", "step", "type")
TYPES = ("int", "float")
LARGEST = 1e300  # bound of a range: samplers compute with twice the value
MAX_SHOWN_CHOICES = 20
STEP_TOLERANCE = 1e-8  # the part of a step by which a number may differ from the range's, as in Optuna
MOST_STEPS = 2**53  # steps of a range: floats cannot distinguish more


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included.

    They are integers if `is_whole`, uniform in their logarithms if `log`, and `step` apart if there is a step.
    `is_guessed` says that they are integers only because both bounds are.
    """

    low: float
    high: float
    log: bool
    step: float | None
    is_whole: bool
    is_guessed: bool = field(default=False, compare=False)

    def contains(self, value: Any) -> bool:
        """Return whether the value is a number of the range."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / (self.step or 1)
        return not (self.is_whole or self.step) or abs(steps - round(steps)) < STEP_TOLERANCE

    def __str__(self) -> str:
        parts = ["integer" if self.is_whole else "real", f"{self.low} to {self.high}"]
        parts += ["log"] if self.log else [] if self.step is None else [f"step {self.step}"]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Choices:
    """A choice of one of these values, which are JSON."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Return whether the value is one of the choices."""
        return any(_write_json(value) == _write_json(choice) for choice in self.values)

    def __str__(self) -> str:
        shown = ", ".join(map(_write_json, self.values[:MAX_SHOWN_CHOICES]))
        more = len(self.values) - MAX_SHOWN_CHOICES
        return f"choice of {escape_text(shown)}" + (f" and {more} more" if more > 0 else "")


Parameter = Range | Choices


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of the variables. A trial takes one of the alternatives, which may have different variables."""

    alternatives: tuple[dict[str, Parameter], ...]
    source: Any  # the JSON of the space

    @property
    def names(self) -> list[str]:
        """The variables of all alternatives."""
        return list(dict.fromkeys(name for alternative in self.alternatives for name in alternative))

    def describe(self) -> list[str]:
        """Return a line for each variable that says how it was read, such as "lr: real, 1e-05 to 0.1, log"."""
        numbered = [(f"space {n}: ", item) for n, item in enumerate(self.alternatives)]
        if len(numbered) == 1:
            numbered = [("", self.alternatives[0])]
        return [f"{prefix}{name}: {parameter}" for prefix, item in numbered for name, parameter in item.items()]

    def list_warnings(self) -> list[str]:
        """Return a sentence for each variable that may have been meant as real numbers."""
        found = {(name, p): None for item in self.alternatives for name, p in item.items() if isinstance(p, Range)}
        return [_warn_of_integers(name, parameter) for name, parameter in found if parameter.is_guessed]

    def find_alternative(self, variables: Mapping[str, Any]) -> int | None:
        """Return the number of the first alternative that contains the point, or None."""
        for number, alternative in enumerate(self.alternatives):
            if alternative.keys() == variables.keys() and all(
                parameter.contains(variables[name]) for name, parameter in alternative.items()
            ):
                return number
        return None


def _warn_of_integers(name: str, parameter: Range) -> str:
    return (
        f"{name} is integer, because both bounds are: for real numbers write {float(parameter.low)} in the place of "
        f"{parameter.low}, or add the type int if integers are meant"
    )


def check_pairs(source: Any) -> None:
    """Raise ConfigurationError for a tuple of two numbers, which could be bounds or choices."""
    for space in source if isinstance(source, (list, tuple)) else [source]:  # type: ignore[reportUnknownVariableType]
        for name, values in space.items() if isinstance(space, Mapping) else ():  # type: ignore[reportUnknownVariableType]
            if (
                isinstance(values, tuple)
                and len(values) == 2
                and all(  # type: ignore[reportUnknownArgumentType]
                    isinstance(value, (int, float)) and not isinstance(value, bool)
                    for value in values  # type: ignore[reportUnknownVariableType]
                )
            ):
                low, high = values  # type: ignore[reportUnknownVariableType]
                raise ConfigurationError(
                    f"the space of {name!r} is the tuple ({low}, {high}), which could be bounds or choices: write "
                    f'{{"low": {low}, "high": {high}}} for all numbers between, or [{low}, {high}] for these two'
                )


def parse_space(source: Any) -> SearchSpace:
    """Return the space for this JSON: a dict of variables, or a list of such dicts. Raises ConfigurationError."""
    alternatives: Any = source if isinstance(source, list) else [source]
    if not alternatives or not all(isinstance(alternative, dict) and alternative for alternative in alternatives):
        raise ConfigurationError(
            'the space is empty or not a dict: give each variable its values, as in {"lr": {"low": 1e-5, '
            '"high": 0.1, "log": true}, "opt": ["adam", "sgd"]}; a list of such dicts has alternatives'
        )
    for name in (name for alternative in alternatives for name in alternative):
        check_variable_name(name, "the space: ")
    return SearchSpace(
        tuple({name: _parse_parameter(name, values) for name, values in item.items()} for item in alternatives), source
    )


def _parse_parameter(name: str, values: Any) -> Parameter:
    if isinstance(values, dict) and set(values) == {"choices"}:
        values = values["choices"]
    if isinstance(values, (list, tuple)):
        return _parse_choices(name, values)  # type: ignore[reportUnknownArgumentType]
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"the space of {name!r} is {values!r}: give a list of choices, or a dict with low and high"
        )
    return _parse_range(name, values)  # type: ignore[reportUnknownArgumentType]


def _parse_choices(name: str, values: Any) -> Choices:
    if not values:
        raise ConfigurationError(f"the space has no choices for {name!r}: give at least one")
    texts = [_write_json(value) for value in values]
    try:
        json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the space of {name!r} has choices that are not UTF-8: replace them") from None
    except ValueError:
        raise ConfigurationError(f"the space of {name!r} has choices that are not JSON: give finite values") from None
    if repeated := next((text for text in texts if texts.count(text) > 1), None):
        raise ConfigurationError(f"the space of {name!r} has the choice {repeated} twice: leave one out")
    return Choices(tuple(values))


def _parse_range(name: str, details: dict[str, Any]) -> Range:
    where = f"the space of {name!r}"
    for word in details:
        if word not in KEYWORDS:
            raise ConfigurationError(f"{where} has the unknown key {word!r}: use {', '.join(KEYWORDS)}, or choices")
    log, step, kind = details.get("log", False), details.get("step"), details.get("type")
    if kind is not None and kind not in TYPES:
        raise ConfigurationError(f"{where} has the type {kind!r}: use int or float")
    if not isinstance(log, bool):
        raise ConfigurationError(f"{where} has log {log!r}: use true or false")
    for word in ("low", "high"):
        if word not in details:
            raise ConfigurationError(f"{where} has no {word}: give low and high")
    numbers = {"low": details["low"], "high": details["high"], **({} if step is None else {"step": step})}
    for word, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:
            raise ConfigurationError(f"{where} has {word} {number!r}: use a finite number")
        if abs(number) > LARGEST:
            shown = repr(number) if isinstance(number, float) else "of so many digits"
            raise ConfigurationError(f"{where} has {word} {shown}: use a finite number of at most {LARGEST:.0e}")
    low, high = numbers["low"], numbers["high"]
    is_whole = kind == "int" if kind is not None else all(isinstance(number, int) for number in numbers.values())
    if is_whole:
        for word, number in numbers.items():
            if number != int(number):
                raise ConfigurationError(f"{where} has whole numbers and {word} {number!r}: use a whole number")
        low, high, step = int(low), int(high), None if step is None else int(step)
    if low > high:
        raise ConfigurationError(f"{where} has low {low} above high {high}: swap them")
    if log and low <= 0:
        raise ConfigurationError(f"{where} is logarithmic and has low {low}: use a low above 0")
    if step is not None and step <= 0:
        raise ConfigurationError(f"{where} has step {step}: use a step above 0")
    if step is not None and (high - low) / MOST_STEPS > step:
        raise ConfigurationError(f"{where} has step {step}, too small for {low} to {high}: leave it out")
    if log and step is not None:
        raise ConfigurationError(f"{where} has both log and step: leave one out")
    if step is not None and low < high and step > high - low:
        raise ConfigurationError(
            f"{where} has step {step}, too large for {low} to {high}: every trial would have {low}; use a smaller step"
        )
    return Range(low, high, log, step, is_whole, is_whole and kind is None and step is None and low < high)


def infer_space(points: list[dict[str, Any]]) -> SearchSpace:
    """Return a space that contains these points: a range for numbers, and choices for other values."""
    alternatives: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for point in points:
        values = alternatives.setdefault(tuple(sorted(point)), {})
        for name, value in point.items():
            values.setdefault(name, {}).setdefault(_write_json(value), value)
    return SearchSpace(
        tuple({n: _infer_parameter(list(v.values())) for n, v in values.items()} for values in alternatives.values()),
        None,
    )


def _infer_parameter(values: list[Any]) -> Parameter:
    if all(type(value) in (int, float) and math.isfinite(value) for value in values):
        is_whole = all(type(value) is int for value in values)
        return Range(min(values), max(values), log=False, step=None, is_whole=is_whole)
    return Choices(tuple(values))


def _write_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
