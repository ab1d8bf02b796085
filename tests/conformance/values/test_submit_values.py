"""Tests of the values that SUBMIT accepts, and of the errors for others."""

from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

KINDS = "which is not JSON: use numbers, text, lists and dicts"
# Values that are not JSON, and the error's text; {} is the value's place.
REFUSED: list[tuple[str, str]] = [
    ("{1: 2}", "{} has the key 1, which is not a string: use strings as keys"),
    ("{b'a': 1}", "{} has the key b'a'"),
    ("collections.ChainMap({1: 2})", "{} is a ChainMap, " + KINDS),
    ("b'abc'", "{} is a bytes, " + KINDS),
    ("memoryview(b'a')", "{} is a memoryview, " + KINDS),
    ("{3, 1, 2}", "{} is a set, " + KINDS),
    ("range(2)", "{} is a range, " + KINDS),
    ("(i for i in range(3))", "{} is a generator, " + KINDS),
    ("1 + 2j", "{} is a complex, " + KINDS),
    ("10 ** 5000", "{} is an integer of more than 4,300 digits: use hex({})"),
    ("decimal.Decimal('1.10')", "{} is a Decimal, " + KINDS),
    ("datetime.datetime(2026, 1, 2, 3)", "{} is a datetime, which is not JSON: use {}.isoformat()"),
    ("datetime.time(3)", "{} is a time, which is not JSON: use {}.isoformat()"),
    ("pathlib.PurePosixPath('/a')", "{} is a PurePosixPath, " + KINDS),
    ("enum.Enum('Size', 'S M').M", "{} is a Size, " + KINDS),
    ("dataclasses.make_dataclass('P', ['x'])(1)", "{} is a P, which is not JSON: use dataclasses.asdict({})"),
    ("type('Model', (), {'model_dump': id})()", "{} is a Model, which is not JSON: use {}.model_dump(mode='json')"),
    ("type('array', (), {'tolist': lambda self: [1, {2}]})()", "{}[1] is a set, " + KINDS),
    ("object()", "{} is an object, " + KINDS),
    ("print", "{} is a builtin_function_or_method, " + KINDS),
    ("type('array', (), {'tolist': lambda self: 1 / 0})()", "raised ZeroDivisionError: division by zero: use"),
    ("type('array', (), {'shape': (1000, 1000), 'tolist': id})()", "save_to_volume"),
]
MODULES = "collections, dataclasses, datetime, decimal, enum, pathlib"


async def read_refusal(interpreter: Interpreter, code: str) -> str:
    """Return the error text of the code's refused SUBMIT."""
    with pytest.raises(SubmitError) as caught:
        await interpreter.execute(code)
    return str(caught.value)


async def test_a_value_that_is_not_json_raises_an_error_that_says_what_to_use(interpreter: Interpreter) -> None:
    for number, (value, words) in enumerate(REFUSED):
        place, path = (("{}", "loss"), ("{{'a': [1, {}]}}", "loss['a'][1]"))[number % 2]
        code = f"import {MODULES}\nloss = {place.format(value)}\n"
        text = await read_refusal(interpreter, code + "SUBMIT(fine=1, loss=loss)")
        assert text.startswith(path), value
        assert words.replace("{}", path) in text, value
        assert "line 3" in text, value
        assert "fine" not in text, value


# Values, and the word with which the error describes the problem.
UNUSUAL = {
    "chr(0xD800)": "surrogate", "{'a': ['x' + chr(0xDFFF)]}": "surrogate", "{chr(0xD800): 1}": "surrogate",
    "(x := [], x.append(x))[0]": "contains itself", "(x := {}, x.update(x=[x]))[0]": "contains itself",
    "10 ** 4999": "digits", "-(10 ** 4999)": "digits", "[10 ** 100000]": "digits",
}  # fmt: skip


async def test_an_error_names_the_field_that_json_cannot_hold(interpreter: Interpreter) -> None:
    for value, word in UNUSUAL.items():
        text = await read_refusal(interpreter, f"SUBMIT(fine='ü', loss={value})")
        assert word in text, value
        assert text.encode()
        assert "loss" in text, value
    code = """
        import sys
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)
        SUBMIT(loss=10 ** 4999)
        """
    assert "loss" in await read_refusal(interpreter, dedent(code)), "the code has lifted its own limit on digits"
    assert (await interpreter.execute("SUBMIT(**{'x' * 1000: 1})")).outputs == {"x" * 1000: 1}


async def test_a_value_nested_up_to_a_hundred_levels_comes_back(interpreter: Interpreter) -> None:
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
    # The limit does not depend on the recursion limit of the sandbox's Python.
    for depth, limit in ((101, 1000), (489, 1000), (800, 1000), (900, 100_000), (5000, 1000)):
        text = await read_refusal(interpreter, dedent(code).replace("depth", str(depth)).replace("limit)", f"{limit})"))
        assert "value" in text
        assert "nested" in text


async def test_the_size_limit_counts_all_fields_together(interpreter: Interpreter) -> None:
    text = await read_refusal(interpreter, "SUBMIT(text='x' * 2 * 1024 * 1024)")
    assert "to a file that `collect` returns, or save it to the volume with save_to_volume" in text
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
async def test_values_come_back_unchanged(interpreter: Interpreter) -> None:
    values: dict[str, Any] = {
        "integers": [0, -1, 2**53 + 1, 10**4000, -(2**64)],
        "floats": [0.1, -0.0, 1e308, 5e-324, 1e16, 123456789.123456789],
        "texts": ["", 'quotes " and \\', "line\nbreak\r\t\0\x1f\x7f\u2028", "😀 é", "</script>", "\ufeff\ufffe"],
        "others": [True, False, None, [], {}, [[]], {"": {"": None}}],
    }
    result = await interpreter.execute("SUBMIT(**values)", {"values": values})
    assert repr(result.outputs) == repr(values)


async def test_subclasses_of_json_types_come_back_as_json_types(interpreter: Interpreter) -> None:
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
