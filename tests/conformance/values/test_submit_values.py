"""The values that SUBMIT takes, and the errors for the others."""

import re
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

REFUSED = {
    "integer keys": ("{1: 2}", r"str\(1\)"),
    "a tuple for a key": ("{(1, 2): 3}", "str"),
    "bytes": ("b'abc'", "decode"),
    "a bytearray": ("bytearray(3)", "decode"),
    "a set": ("{3, 1, 2}", "sorted|list"),
    "an object": ("object()", "numbers, text, lists and dicts"),
    "a function": ("print", "numbers, text, lists and dicts"),
    "a complex number": ("1j", "numbers, text, lists and dicts"),
    "a generator": ("(i for i in range(3))", "numbers, text, lists and dicts"),
    "an array that cannot be read": (
        "type('Sparse', (), {'tolist': lambda self: 1 / 0})()",
        "raised ZeroDivisionError",
    ),
    "a number that Python has not": ("type('longdouble', (), {'tolist': lambda self: self})()", r"float\("),
    "an array of objects": ("type('array', (), {'tolist': lambda self: [1, {2}]})()", "sorted|list"),
    "an array without an end": ("type('array', (), {'shape': (1000, 1000), 'tolist': id})()", "save_to_volume"),
    "a table": ("type('DataFrame', (), {'to_dict': id})()", r"to_dict\('records'\)"),
}


async def refusal(interpreter: Interpreter, code: str) -> str:
    """Return the text of the error with which the code's SUBMIT is refused."""
    with pytest.raises(SubmitError) as caught:
        await interpreter.execute(code)
    return str(caught.value)


async def test_what_is_not_json_is_an_error_that_names_the_field_and_the_remedy(interpreter: Interpreter) -> None:
    for number, (name, (value, remedy)) in enumerate(REFUSED.items()):
        place, path = (("{}", "loss"), ("{{'a': [1, {}]}}", "loss['a'][1]"))[number % 2]
        text = await refusal(interpreter, f"fine = 1\nSUBMIT(fine=fine, loss={place.format(value)})")
        assert text.startswith(path), name
        assert re.search(remedy, text), name
        assert "line 2" in text, name
        assert "fine" not in text, name


# The value, and the word that the error has for what is wrong with it.
UNUSUAL = {
    "chr(0xD800)": "surrogate", "{'a': ['x' + chr(0xDFFF)]}": "surrogate", "{chr(0xD800): 1}": "surrogate",
    "(x := [], x.append(x))[0]": "contains itself", "(x := {}, x.update(x=[x]))[0]": "contains itself",
    "10 ** 4999": "digits", "-(10 ** 4999)": "digits", "[10 ** 100000]": "digits",
}  # fmt: skip


async def test_what_json_cannot_hold_is_an_error_that_names_the_field(interpreter: Interpreter) -> None:
    for value, word in UNUSUAL.items():
        text = await refusal(interpreter, f"SUBMIT(fine='ü', loss={value})")
        assert word in text, value
        assert text.encode()
        assert "loss" in text, value
    code = """
        import sys
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)
        SUBMIT(loss=10 ** 4999)
        """
    assert "loss" in await refusal(interpreter, dedent(code)), "the code has lifted its own limit on digits"
    assert "1,000 characters" in await refusal(interpreter, "SUBMIT(fine=1, **{'x' * 1001: 1})")
    assert (await interpreter.execute("SUBMIT(**{'x' * 1000: 1})")).outputs == {"x" * 1000: 1}


async def test_a_nested_value_comes_back_whole_up_to_a_hundred_levels(interpreter: Interpreter) -> None:
    code = """
        import sys
        sys.setrecursionlimit(limit)
        value = 0
        for number in range(depth):
            value = {"x": value} if number % 2 else [value]
        SUBMIT(value=value, flat=[[]] * 500)
        """
    for depth in (0, 10, 100):
        value: Any = (await interpreter.execute(dedent(code), {"depth": depth, "limit": 1000})).value
        for number in reversed(range(depth)):
            value = value["x" if number % 2 else 0]
        assert value == 0
    # The limit is the same however deep the sandbox's own Python could go.
    for depth, limit in ((101, 1000), (489, 1000), (800, 1000), (900, 100_000), (5000, 1000)):
        text = await refusal(interpreter, dedent(code).replace("depth", str(depth)).replace("limit)", f"{limit})"))
        assert "value" in text
        assert "nested too deeply" in text


async def test_the_limit_counts_the_bytes_of_all_fields_together(interpreter: Interpreter) -> None:
    text = await refusal(interpreter, "SUBMIT(text='x' * 2 * 1024 * 1024)")
    assert "save_to_volume" in text
    assert "1,048,576" in text
    assert "2,097,1" in text
    full = 1024 * 1024 - len('{"a":"","b":""}')
    result = await interpreter.execute("SUBMIT(a='x' * 1000, b='y' * (n - 1000))", {"n": full})
    assert len(result.a) + len(result.b) == full
    with pytest.raises(SubmitError, match="1,048,577 bytes"):
        await interpreter.execute("SUBMIT(a='x' * 1000, b='y' * (n - 999))", {"n": full})
    with pytest.raises(SubmitError, match="bytes of JSON"):
        await interpreter.execute("SUBMIT(a='é' * (n // 2), b='y' * 1000)", {"n": full})


@pytest.mark.every_provider
async def test_values_come_back_as_they_were(interpreter: Interpreter) -> None:
    values: dict[str, Any] = {
        "integers": [0, -1, 2**53 + 1, 10**4000, -(2**64)],
        "floats": [0.1, -0.0, 1e308, 5e-324, 1e16, 123456789.123456789],
        "texts": ["", 'quotes " and \\', "line\nbreak\r\t\0\x1f\x7f\u2028", "😀 é", "</script>", "\ufeff\ufffe"],
        "others": [True, False, None, [], {}, [[]], {"": {"": None}}],
    }
    result = await interpreter.execute("SUBMIT(**values)", {"values": values})
    assert repr(result.outputs) == repr(values)


async def test_kinds_of_json_types_come_back_as_those(interpreter: Interpreter) -> None:
    code = """
        import collections, enum
        class Size(enum.IntEnum):
            S = 3
        class Text(str): pass
        Point = collections.namedtuple("Point", "x y")
        counts = collections.Counter("aab")
        SUBMIT(size=Size.S, text=Text("t"), point=Point(1, 2), counts=counts,
               ordered=collections.OrderedDict(b=1, a=2), default=collections.defaultdict(list, k=[1]))
        """
    result = await interpreter.execute(dedent(code))
    assert result.outputs == {
        "size": 3, "text": "t", "point": [1, 2], "counts": {"a": 2, "b": 1},
        "ordered": {"b": 1, "a": 2}, "default": {"k": [1]},
    }  # fmt: skip
    assert list(result.ordered) == ["b", "a"]
