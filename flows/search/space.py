"""A search space: the values that each variable may have, as JSON. An error in it is reported in one sentence."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ...blocks.problems import describe_problems
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.requests.execution_request import check_variable_name

MAX_SHOWN_CHOICES = 20
MAX_EXACT = 2**53  # Optuna compares integers as floats, which are exact up to here
STEP_TOLERANCE = 1e-8  # the part of a step by which a number may differ from the range's, as in Optuna


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included.

    They are integers if `is_whole`, uniform in their logarithms if `log`, and `step` apart if there is a step.
    """

    low: float
    high: float
    log: bool
    step: float | None
    is_whole: bool

    def contains(self, value: Any) -> bool:
        """Return whether the value is a number of the range."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            return False
        if self.step is None and not self.is_whole:
            return True
        steps = (value - self.low) / (self.step or 1)
        return abs(steps - round(steps)) < STEP_TOLERANCE

    def __str__(self) -> str:
        parts = ["integer" if self.is_whole else "real", f"{self.low} to {self.high}"]
        if self.log:
            parts.append("log")
        elif self.step is not None:
            parts.append(f"step {self.step}")
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
        lines: list[str] = []
        for number, alternative in enumerate(self.alternatives):
            prefix = f"space {number}: " if len(self.alternatives) > 1 else ""
            lines += [f"{prefix}{name}: {parameter}" for name, parameter in alternative.items()]
        return lines

    def find_alternative(self, variables: Mapping[str, Any], *, may_lack_variables: bool = False) -> int | None:
        """Return the number of the first alternative that contains the point, or None."""
        for number, alternative in enumerate(self.alternatives):
            lacks_variables = alternative.keys() - variables.keys()
            if lacks_variables and not may_lack_variables:
                continue
            if all(name in alternative and alternative[name].contains(value) for name, value in variables.items()):
                return number
        return None


def check_pairs(source: Any) -> None:
    """Raise ConfigurationError for a tuple of two numbers, which could be bounds or choices."""
    for space in source if isinstance(source, (list, tuple)) else [source]:  # type: ignore[reportUnknownVariableType]
        for name, values in space.items() if isinstance(space, Mapping) else ():  # type: ignore[reportUnknownVariableType]
            if isinstance(values, tuple) and len(values) == 2 and all(type(value) in (int, float) for value in values):  # type: ignore[reportUnknownVariableType]
                raise ConfigurationError(
                    f"the space of {name!r} is the tuple {values}, which could be bounds or choices: write a dict with "
                    "low and high for all numbers between, or a list for these two"
                )


def parse_space(source: Any) -> SearchSpace:
    """Return the space for this JSON: a dict of variables, or a list of such dicts. Raises ConfigurationError."""
    alternatives: Any = source if isinstance(source, list) else [source]
    if not alternatives or not all(isinstance(alternative, dict) and alternative for alternative in alternatives):
        raise ConfigurationError(
            'the space is empty or not a dict: give each variable its values, as in {"lr": {"low": 1e-5, '
            '"high": 0.1, "log": true}, "opt": ["adam", "sgd"]}; a list of such dicts has alternatives'
        )
    parsed: list[dict[str, Parameter]] = []
    for alternative in alternatives:
        for name in alternative:
            check_variable_name(name, "the space: ")
        parsed.append({name: _parse_parameter(name, values) for name, values in alternative.items()})
    return SearchSpace(tuple(parsed), source)


class _Bounds(BaseModel):
    """The JSON of a range."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None
    type: Literal["int", "float"] | None = None


class _WholeBounds(_Bounds):
    """The JSON of a range of integers. Its numbers may be floats without a fraction, such as 1.0."""

    model_config = ConfigDict(strict=False)
    low: int  # type: ignore[reportIncompatibleVariableOverride]
    high: int  # type: ignore[reportIncompatibleVariableOverride]
    step: int | None = None  # type: ignore[reportIncompatibleVariableOverride]


def _parse_parameter(name: str, values: Any) -> Parameter:
    if isinstance(values, dict) and set(values) == {"choices"}:
        values = values["choices"]
    if isinstance(values, (list, tuple)) and values:
        return Choices(tuple(values))  # type: ignore[reportUnknownArgumentType]
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"the space of {name!r} is {values!r}: give a list of choices, or a dict with low and high"
        )
    is_int: bool = values.get("type") == "int"  # type: ignore[reportUnknownMemberType]
    try:
        bounds = (_WholeBounds if is_int else _Bounds).model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"the space of {name!r}: {describe_problems(error)}") from None
    has_integers = all(isinstance(number, int) for number in (bounds.low, bounds.high, bounds.step or 0))
    is_whole = is_int or (bounds.type is None and has_integers)
    return Range(bounds.low, bounds.high, bounds.log, bounds.step, is_whole)


def infer_space(points: list[dict[str, Any]]) -> SearchSpace:
    """Return a space that contains these points: a range for numbers, and choices for other values.

    Points with the same variables are in one alternative.
    """
    points_by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for point in points:
        points_by_names.setdefault(tuple(sorted(point)), []).append(point)
    return SearchSpace(tuple(map(_infer_alternative, points_by_names.values())), None)


def _infer_alternative(points: list[dict[str, Any]]) -> dict[str, Parameter]:
    return {name: _infer_parameter([point[name] for point in points]) for name in points[0]}


def _infer_parameter(values: list[Any]) -> Parameter:
    is_numeric = all(type(value) is int or (type(value) is float and math.isfinite(value)) for value in values)
    if is_numeric and all(type(value) is float or abs(value) <= MAX_EXACT for value in values):
        is_whole = all(type(value) is int for value in values)
        return Range(min(values), max(values), log=False, step=None, is_whole=is_whole)
    distinct = {_write_json(value): value for value in values}
    return Choices(tuple(distinct.values()))


def _write_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
