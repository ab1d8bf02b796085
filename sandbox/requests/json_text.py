"""JSON that people write. An object with the same key twice is refused, because its earlier value would be lost."""

import json
import math
import re
from typing import Any

TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]', re.DOTALL)


class RepeatedKeyError(json.JSONDecodeError):
    """JSON has an object with the same key twice. The message names the key and its second place."""


def read_float(text: str) -> float:
    """Return the text as a float. Raises ValueError if a number other than 0 and inf would become 0 or inf."""
    value = float(text)
    if (not value or math.isinf(value)) and re.search("[1-9]", re.split("[eE]", text)[0]):
        raise ValueError(f"{text} is {'too small' if not value else 'more than a number can be'}")
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise KeyError
    return value


class Decoder(json.JSONDecoder):
    """A decoder that refuses repeated keys, and numbers that a float cannot hold."""

    def __init__(self) -> None:
        super().__init__(parse_float=read_float, object_pairs_hook=_build_object)

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """Return the value at index `idx`, and the index of its end. Raises ValueError and RecursionError."""
        try:
            return super().raw_decode(s, idx)
        except KeyError:
            raise _find_repeated_key(s, idx) from None


def _find_repeated_key(text: str, begin: int) -> RepeatedKeyError:
    """Return the error for the first repeated key from `begin` on. There must be one."""
    objects: list[set[str]] = []  # the keys of each object that is open
    for token in TOKEN.finditer(text, begin):
        if token[0] == "{":
            objects.append(set())
        elif token[0] == "}":
            objects.pop()
        elif token[2] is not None:
            key = json.loads(token[1])
            if key in objects[-1]:
                return RepeatedKeyError(f"the key {key!r} is twice in one object", text, token.start())
            objects[-1].add(key)
    raise AssertionError("no key is repeated")


JSON = Decoder()
