"""The description of pydantic's errors: the parameter, its value, and the valid values."""

import re
import reprlib
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from ..sandbox.outcomes.text_escape import escape_text

# The part of a location that names one alternative of a union.
UNION_TAG = re.compile(r"constrained-\w+|literal\[.*\]|(str|int|float|bool|list|dict)(\[.*\])?")


def describe_problems(error: ValidationError, secrets: Collection[str] = ()) -> str:
    """Return one line about all wrong values. It omits the values of the parameters in `secrets`."""
    by_name: dict[str, list[Any]] = {}
    for problem in error.errors():
        location = _list_location(problem)
        name = str(location[0]) if location else ""
        by_name.setdefault(name, []).append(problem)
    return "; ".join(_describe_parameter(problems, name in secrets) for name, problems in by_name.items())


def _list_location(problem: Any) -> list[str | int]:
    """Return the parameter's name, and the keys and positions in its value."""
    return [item for item in problem["loc"] if not UNION_TAG.fullmatch(str(item))]


def _describe_parameter(problems: list[Any], is_secret: bool) -> str:
    """Return the problem of one parameter. For a union, use the alternatives with the deepest error."""
    location = max((_list_location(problem) for problem in problems), key=len)
    alternatives = [problem for problem in problems if _list_location(problem) == location]
    problem = alternatives[0]
    first, *others = [_simplify_message(alternative["msg"]) for alternative in alternatives]
    if not location:
        return first  # A validator of the whole model raised it.
    name = f"`{location[0]}`" + "".join(f"[{item!r}]" for item in location[1:])
    if problem["type"] == "value_error":
        return f"{name}: {first}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    text = " or ".join([first, *(other.removeprefix("it should be ") for other in others)])
    return f"{name}: {text}" if is_secret else f"{name} is {escape_text(reprlib.repr(problem['input']))}: {text}"


def _simplify_message(message: str) -> str:
    message = message.removeprefix("Value error, ").partition(", unable to parse")[0]
    return message.replace("Input should be", "it should be").replace("String should", "it should")
