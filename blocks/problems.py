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
    by_name: dict[str, list[tuple[list[Any], Any]]] = {}
    for problem in error.errors():
        place = [item for item in problem["loc"] if not UNION_TAG.fullmatch(str(item))]
        by_name.setdefault(str(place[0]) if place else "", []).append((place, problem))
    return "; ".join(_describe_problem(problems, name in secrets) for name, problems in by_name.items())


def _describe_problem(problems: list[tuple[list[Any], Any]], is_secret: bool) -> str:
    """Return the problem of one parameter. For a union, use the alternative with the deepest error."""
    deepest = max((place for place, _ in problems), key=len)
    alternatives = [problem for place, problem in problems if place == deepest]
    problem, texts = alternatives[0], [_simplify(item["msg"]) for item in alternatives]
    name = "".join(f"[{item!r}]" if level else f"`{item}`" for level, item in enumerate(deepest))
    if problem["type"] == "value_error":
        return ": ".join(filter(None, (name, texts[0])))
    if problem["type"] == "missing":
        return f"{name} is missing"
    text = " or ".join([texts[0], *(text.removeprefix("it should be ") for text in texts[1:])])
    return f"{name}: {text}" if is_secret else f"{name} is {escape_text(reprlib.repr(problem['input']))}: {text}"


def _simplify(message: str) -> str:
    message = message.removeprefix("Value error, ").partition(", unable to parse")[0]
    return message.replace("Input should be", "it should be").replace("String should", "it should")
