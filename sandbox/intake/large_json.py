"""JSON of a sandbox's that would hold the event loop for too long: it is read in parts, with pauses between them.

A thread would be no help: the scanner is native code, and holds the interpreter's lock until it is done.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Generator
from typing import Any, TypeVar

from ..wire.strict_json import MAX_CONTAINERS, dumps, loads, scan_value

T = TypeVar("T")
Parts = Generator[None, None, T]  # work in parts of a few milliseconds, and what comes of it

QUICK_BYTES = 64 * 1024  # that take no 10 ms, whatever they are
QUICK_TEXT_BYTES = 256 * 1024  # that take no 10 ms where there are few values in them
QUICK_VALUES = 40_000  # that take no 10 ms, lists of lists included
VALUES_AT_ONCE = 2_000
CHARACTERS_AT_ONCE = 128 * 1024
SHORT_CHARACTERS = 4096  # of a text that the scanner reads in one go
MAX_DEPTH = 500  # of lists and dicts, half of what Python's own encoder goes down
# As much of a text as there is whole: up to its end, or to an escape, or the first of a pair of them, that is cut off.
# Greedy and not possessive, which is the same here: Python 3.11.2 would take the first of a pair that is cut off.
TEXT = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9A-Fa-f]{4}'
    r"|\\u[0-9A-Fa-f]{4}(?=[^\\]|\\[^u]|\\u[0-9A-Fa-f]{4}))*"
)


def is_large(body: bytes) -> bool:
    """Whether JSON is read in parts."""
    return len(body) > QUICK_TEXT_BYTES or (len(body) > QUICK_BYTES and _count_values(body) > QUICK_VALUES)


def read_json(body: bytes, max_depth: int = MAX_DEPTH) -> Parts[Any]:
    """The value of compact JSON. Raises ValueError or RecursionError, also for text that UTF-8 cannot hold.

    Of large JSON also for more than `MAX_CONTAINERS` lists and dicts, or `max_depth` of them inside one another.
    """
    if is_large(body):
        text = yield from _decode(body)
        return (yield from _read_values(text, max_depth, has_escapes=b"\\u" in body))
    value = loads(body.decode("utf-8"))
    if b"\\u" in body:  # the driver escapes no letters; whoever wrote this may have escaped half a one
        dumps(value).encode("utf-8")
    return value


def finish(parts: Parts[T]) -> T:
    """What comes of the work, done in one go."""
    try:
        while True:
            next(parts)
    except StopIteration as end:
        return end.value


async def finish_in_turns(parts: Parts[T]) -> T:
    """What comes of the work; between its parts the event loop does other things."""
    try:
        while True:
            next(parts)
            await asyncio.sleep(0)
    except StopIteration as end:
        return end.value


def _count_values(body: bytes) -> int:
    """The values in a JSON text, or more where its texts have punctuation; it stops where there are too many."""
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
    """The value, by a loop of Python's own around the scanner, which reads texts and numbers."""
    at, count, containers = 0, 0, 0
    pause_at = CHARACTERS_AT_ONCE
    around: list[tuple[Any, str, str]] = []  # the lists and dicts around the one that is read: what follows is theirs
    inner: Any = None
    end, key = "", ""  # the mark that ends it, and the key that the next value has in it
    keys: dict[str, str] = {}  # each key once, as the scanner has them
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
    """The text, number or constant that begins there, and where it ends."""
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
