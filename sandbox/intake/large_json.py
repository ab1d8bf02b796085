"""A JSON parser that reads large JSON in parts, with pauses in which the event loop does other work.

A thread would not help: the scanner is native code and holds the GIL until it returns.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Generator
from typing import Any, TypeVar

from ..wire.strict_json import MAX_CONTAINERS, dumps, loads, scan_value

T = TypeVar("T")
Parts = Generator[None, None, T]  # work that yields every few milliseconds and returns its result

# Parsing up to these sizes takes less than 10 ms.
QUICK_BYTES = 64 * 1024  # any JSON
QUICK_TEXT_BYTES = 256 * 1024  # JSON with at most `QUICK_VALUES` values
QUICK_VALUES = 40_000  # nested lists included
VALUES_AT_ONCE = 2_000
CHARACTERS_AT_ONCE = 128 * 1024
SHORT_CHARACTERS = 4096  # the scanner reads a shorter string in one call
MAX_DEPTH = 500  # nested lists and dicts; half of the depth that Python's own encoder supports
# The complete characters at the beginning of a piece of a string. The match ends before an escape or a
# surrogate pair that the piece cuts off. The quantifiers are greedy: possessive ones should be
# equivalent here, but Python 3.11.2 would match the first half of such a pair.
TEXT = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9A-Fa-f]{4}'
    r"|\\u[0-9A-Fa-f]{4}(?=[^\\]|\\[^u]|\\u[0-9A-Fa-f]{4}))*"
)


def is_large(body: bytes) -> bool:
    """Return True if this JSON should be parsed in parts."""
    return len(body) > QUICK_TEXT_BYTES or (len(body) > QUICK_BYTES and _count_values(body) > QUICK_VALUES)


def read_json(body: bytes, max_depth: int = MAX_DEPTH) -> Parts[Any]:
    """Parse compact JSON. Raises ValueError or RecursionError, also for text that UTF-8 cannot encode.

    Large JSON with too many lists and dicts (`MAX_CONTAINERS`) or levels (`max_depth`) also raises these errors.
    """
    if is_large(body):
        text = yield from _decode(body)
        return (yield from _read_values(text, max_depth, has_escapes=b"\\u" in body))
    value = loads(body.decode("utf-8"))
    if b"\\u" in body:  # the driver escapes control characters only; untrusted JSON may have a lone surrogate
        dumps(value).encode("utf-8")
    return value


def finish(parts: Parts[T]) -> T:
    """Run the work without pauses and return its result."""
    try:
        while True:
            next(parts)
    except StopIteration as end:
        return end.value


async def finish_in_turns(parts: Parts[T]) -> T:
    """Run the work and return its result. The event loop runs between the parts."""
    try:
        while True:
            next(parts)
            await asyncio.sleep(0)
    except StopIteration as end:
        return end.value


def _count_values(body: bytes) -> int:
    """Return an upper bound of the number of values; stop counting above `QUICK_VALUES`."""
    values = 0
    for begin in range(0, len(body), QUICK_BYTES):
        values += sum(body.count(mark, begin, begin + QUICK_BYTES) for mark in (b",", b"[", b"{", b":"))
        if values > QUICK_VALUES:
            break
    return values


def _decode(body: bytes) -> Parts[str]:
    decoder, parts = codecs.getincrementaldecoder("utf-8")(), list[str]()
    for begin in range(0, len(body), CHARACTERS_AT_ONCE):
        end = begin + CHARACTERS_AT_ONCE
        parts.append(decoder.decode(body[begin:end], final=end >= len(body)))
        yield
    return "".join(parts)


def _read_values(text: str, max_depth: int, *, has_escapes: bool) -> Parts[Any]:
    """Parse the JSON with a Python loop, which calls the native scanner for strings and numbers."""
    at, count, containers = 0, 0, 0
    pause_at = CHARACTERS_AT_ONCE
    around: list[tuple[Any, str, str]] = []  # enclosing lists and dicts, each with its `end` and `key`
    inner: Any = None  # the innermost list or dict
    end, key = "", ""  # closing bracket of `inner`, and the key of its next value
    keys: dict[str, str] = {}  # shares equal keys, as the scanner does
    while True:
        mark = text[at : at + 1]
        if mark == "[" or mark == "{":
            if len(around) == max_depth:
                raise RecursionError(f"nested too deeply, more than {max_depth} levels")
            value: Any = [] if mark == "[" else {}
            value_end = "]" if mark == "[" else "}"
            at += 1
            containers += 1
            if containers > MAX_CONTAINERS:
                raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dicts")
            if text[at : at + 1] != value_end:
                around.append((inner, end, key))
                inner, end = value, value_end
                if mark == "{":
                    key, at = yield from _read_key(text, at, keys, has_escapes)
                continue
            at += 1
        else:
            value, at = yield from _read_scalar(text, at, has_escapes)
        count += 1
        if count >= VALUES_AT_ONCE or at > pause_at:
            count, pause_at = 0, at + CHARACTERS_AT_ONCE
            yield
        while end:
            if end == "]":
                inner.append(value)
            else:
                inner[key] = value
            mark = text[at : at + 1]
            at += 1
            if mark == ",":
                if end == "}":
                    key, at = yield from _read_key(text, at, keys, has_escapes)
                break
            if mark != end:
                raise ValueError("not JSON")
            value = inner
            inner, end, key = around.pop()
        else:
            if at != len(text):
                raise ValueError("more than one JSON value")
            return value


def _read_key(text: str, at: int, keys: dict[str, str], has_escapes: bool) -> Parts[tuple[str, int]]:
    if text[at : at + 1] != '"':
        raise ValueError("not JSON")
    key, at = yield from _read_scalar(text, at, has_escapes)
    if text[at : at + 1] != ":":
        raise ValueError("not JSON")
    return keys.setdefault(key, key), at + 1


def _read_scalar(text: str, at: int, has_escapes: bool) -> Parts[tuple[Any, int]]:
    """Return the string, number or constant at this index, and the index after it."""
    if text[at : at + 1] == '"':
        end = text.find('"', at + 1, at + SHORT_CHARACTERS)
        if end < 0 or text[end - 1] == "\\":
            value, at = yield from _read_text(text, at)
        else:
            value, at = scan_value(text, at)
        if has_escapes:
            value.encode("utf-8")
        return value, at
    return scan_value(text, at)


def _read_text(text: str, at: int) -> Parts[tuple[str, int]]:
    parts = list[str]()
    begin = at + 1
    while True:
        end = begin + len(TEXT.match(text, begin, begin + CHARACTERS_AT_ONCE)[0])  # type: ignore[reportOptionalSubscript]
        is_end = text[end : end + 1] == '"'
        if not is_end and end == begin:
            raise ValueError("not JSON")
        parts.append(scan_value(f'"{text[begin:end]}"', 0)[0])
        if is_end:
            return "".join(parts), end + 1
        begin = end
        yield
