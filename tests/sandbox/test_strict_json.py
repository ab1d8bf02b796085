"""Tests that the wire's JSON agrees with the standard library's."""

import json
import math
import random
from typing import Any

import pytest

from rlm_batch.sandbox.wire.strict_json import NotJsonError, dumps, encode_fields, encode_in_parts, loads

TEXTS = [
    "", "a", 'quotes " \\ /', "\0\x1f\x7f\x80", "\b\f\n\r\t", "é😀\u2028\u2029", "\ud800", "\udfff\ud800", "x" * 999,
]  # fmt: skip
FLOATS = [0.0, -0.0, 0.1, 1e16, 1e22, 1e-7, 5e-324, 1.7976931348623157e308, 123456789.123, 1 / 3]
INTEGERS = [0, -1, 2**31, 2**53 + 1, -(2**64), 10**300]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kind = chance.randrange(8 if depth < 5 else 6)
    if kind == 0:
        return chance.choice([None, True, False])
    if kind == 1:
        return chance.choice([*INTEGERS, chance.getrandbits(60)])
    if kind == 2:
        return chance.choice(
            [*FLOATS, chance.uniform(-1e9, 1e9), math.ldexp(chance.random(), chance.randrange(-900, 900))]
        )
    if kind < 6:
        return chance.choice([*TEXTS, "".join(chr(chance.randrange(0x110000)) for _ in range(chance.randrange(9)))])
    if kind == 6:
        return [value(chance, depth + 1) for _ in range(chance.randrange(6))]
    return {chance.choice(TEXTS) + str(i): value(chance, depth + 1) for i in range(chance.randrange(6))}


def plain(thing: Any) -> str:
    return json.dumps(thing, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def test_values_are_written_and_read_as_the_standard_library_does() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        thing = value(chance)
        text = dumps(thing)
        assert text == plain(thing)
        assert repr(loads(text)) == repr(thing)
        ascii_text = json.dumps(thing, separators=(",", ":"))
        assert repr(loads(ascii_text)) == repr(json.loads(ascii_text))


def test_values_that_the_standard_library_cannot_write_are_refused() -> None:
    for thing in (math.nan, [math.inf], {"a": -math.inf}, 10**5000):
        with pytest.raises(ValueError, match=r".+"):
            dumps(thing)
    for thing in (object(), {1}, b"x", {(1, 2): 3}, 1j):
        with pytest.raises((TypeError, ValueError)):
            dumps(thing)


def test_invalid_json_is_refused() -> None:
    texts = ["", " ", "{", "[1,]", "nul", "NaN", "Infinity", "-Infinity", "[NaN]", "1 2", "{}x", "'a'", '"\n"', "01"]
    texts += ["1e999", "-1e999", '{"x":[1e309]}', "9" * 400 + ".5", "1" + "0" * 400 + "e0"]
    texts += ['{"a"}', "{1:2}", "+1", ".5", "1.", '"\\x"', "1" * 5000]
    for text in texts:
        with pytest.raises(ValueError, match=r".+"):
            loads(text)
    with pytest.raises((ValueError, RecursionError)):
        loads("[" * 100_000)


def test_an_error_names_the_path_of_a_field_that_json_cannot_hold() -> None:
    fields = {"a": (1, [2.5, None]), "b": {"c": "é", "d": {}}}
    assert encode_fields(fields) == '{"a":[1,[2.5,null]],"b":{"c":"é","d":{}}}'.encode()
    itself: list[Any] = []
    itself.append(itself)
    for thing in (math.nan, b"", {1: 2}, {3}, object(), "\ud800", itself, 10**5000):
        with pytest.raises(NotJsonError, match="loss"):
            encode_fields({"fine": 1, "loss": [thing]})


def test_large_texts_become_the_same_json_by_every_writer() -> None:
    plain_text, end = "a😀\u2028" * 20_000, "".join(map(chr, range(0x120)))
    for marks in ('"', "\\", "\x01é", '\\"\n', ""):
        fields = {"first": 1, 'a "name"': plain_text + marks * 3 + end, "full": marks * 20_000, "small": [marks, end]}
        text = b"".join(encode_in_parts(fields)).decode()
        assert text == dumps(fields)
        assert loads(text) == fields
