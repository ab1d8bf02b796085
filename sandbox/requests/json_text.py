"""JSON that people write. An object with the same key twice is refused, because its earlier value would be lost."""

import json
import math
import re
from collections import Counter
from typing import Any


class RepeatedKeyError(ValueError):
    """JSON has an object with the same key twice."""


def read_float(text: str) -> float:
    """Return the text as a float. Raises ValueError if a number other than 0 and inf would become 0 or inf."""
    value = float(text)
    is_extreme = value == 0 or math.isinf(value)
    if is_extreme and re.match("[^eE]*[1-9]", text):  # The text has a digit, so it means neither 0 nor inf.
        problem = "too small" if value == 0 else "more than a number can be"
        raise ValueError(f"{text} is {problem}")
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RepeatedKeyError(f"the key {repeated!r} is twice in one object")
    return value


JSON = json.JSONDecoder(parse_float=read_float, object_pairs_hook=_build_object)
