"""Tests of the values that code shows besides its submitted fields: its last value, and its displays."""

import json
import math
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeCrashed, CodeError, Result
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json

from ..gate import FIND_CHANNEL

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

SHAPES = """
class Shape:
    def __repr__(self): return "Shape()"
    def _repr_html_(self): return "<b>shape</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_svg_(self): raise ValueError("no lines")
    def _repr_mimebundle_(self, include=None, exclude=None): return {"application/json": {"sides": [3]}}, {}
"""
SHAPE = {
    "application/json": {"sides": [3]}, "text/html": "<b>shape</b>", "image/png": "iVBORw==", "text/plain": "Shape()",
}  # fmt: skip


async def run(interpreter: Interpreter, code: str, **more: Any) -> Result:
    """Run the code and return the result, after checking that JSON preserves its meta."""
    result = await interpreter.execute(dedent(code), **more)
    line = json.dumps(outcome_to_json(result), allow_nan=False)
    assert repr(outcome_from_json(json.loads(line)).meta) == repr(result.meta)
    return result


async def test_the_last_value_and_displays_come_back(interpreter: Interpreter) -> None:
    result = await run(interpreter, f"{SHAPES}\ndisplay(1, Shape())\nprint('said')\nSUBMIT(value='a field')")
    assert (result.value, result.meta.value, result.meta.stdout) == ("a field", None, "said\n")
    assert result.meta.displays == ({"text/plain": "1"}, SHAPE)
    assert result.meta.stderr.count("Shape._repr_svg_ raised ValueError: no lines") == 1
    result = await run(interpreter, f"{SHAPES}\nShape()", context="kept")
    assert (result.outputs, result.meta.value, result.meta.value_repr) == ({}, None, "Shape()")
    assert result.meta.displays == (SHAPE,)
    result = await run(interpreter, "[1, (2, x)]", variables={"x": "y" * 300_000}, context="kept")
    assert result.meta.value == [1, [2, "y" * 300_000]]


async def test_only_a_last_expression_gives_a_value(interpreter: Interpreter) -> None:
    for code, value in {
        "x = 1\nx + 1": 2, "x = 1; 42": 42, "(1\nif True else 2)": 1, '"""\n x = 1\n"""': "\n x = 1\n",
        "sorted(\n{2, 1}\n)  # sorted\n# done\n": [1, 2], "x = 1": None, "if True:\n    3": None, "print(3)": None,
        "x = '''\n3'''": None, "from __future__ import annotations\ndef f(a: B): pass": None, "": None,
        "def f(): return 5\nf()": 5,
    }.items():  # fmt: skip
        meta = (await run(interpreter, code)).meta
        assert (meta.value, meta.value_repr, meta.displays) == (value, None, ()), code
    nan, pairs = (await run(interpreter, "[float('nan'), {'a/b': float('-inf')}]")).meta.value
    assert math.isnan(nan)
    assert pairs == {"a/b": -math.inf}
    for code, text in {
        "{1}": "{1}", "b'a'": "b'a'", "{1: 2}": "{1: 2}", "class A:\n    def __repr__(self): return 1 / 0\nA()":
        "<A, whose repr raised ZeroDivisionError: division by zero>",
    }.items():  # fmt: skip
        meta = (await run(interpreter, code)).meta
        assert (meta.value, meta.value_repr) == (None, text)


async def test_a_too_large_value_or_display_is_truncated_and_named(interpreter: Interpreter) -> None:
    meta = (await run(interpreter, "'é' * 2_000_000")).meta
    assert meta.value is None
    assert str(meta.value_repr).endswith("é'\n[... 1,980,000 characters left out ...]")
    code = """
        class Large:
            def __repr__(self): return "L" * 50_000_000
            def _repr_html_(self): return "x" * 100_000_000
            def _repr_png_(self): return b"x" * 1_000_000
        display(Large(), Large(), Large(), Large())
        Large()
        """
    *first, fourth, last = (await run(interpreter, code)).meta.displays
    assert [len(bundle["image/png"]) for bundle in first] == [1_333_336] * 3
    for bundle in (*first, fourth, last):
        assert "text/html of 100,000,000 bytes" in bundle["text/plain"]
        assert "an execution may display 4 MiB and 1,000 displays" in bundle["text/plain"]
    assert all("image/png of 1,333,336 bytes" in bundle["text/plain"] for bundle in (fourth, last))
    displays = (await run(interpreter, "for number in range(3000): display(number)")).meta.displays
    assert [displays[0], displays[998], len(displays)] == [{"text/plain": "0"}, {"text/plain": "998"}, 1000]
    assert displays[-1]["text/plain"].startswith("[left out: this display and the following ones; ")


async def test_a_repr_that_ends_its_process_ends_only_its_execution(interpreter: Interpreter) -> None:
    code = "class A:\n    def __repr__(self):\n        {}\ndisplay(1)\nA()"
    with pytest.raises(CodeCrashed, match=r"exit\(7\)"):
        await interpreter.execute(code.format("raise SystemExit(7)"))
    with pytest.raises(CodeError, match="KeyboardInterrupt") as error:
        await interpreter.execute(code.format("raise KeyboardInterrupt"))
    assert "<driver>" not in str(error.value)
    result = await interpreter.execute(code.format("SUBMIT(from_repr=True)"))
    assert result.outputs == {"from_repr": True}
    assert (await interpreter.execute("2")).meta.value == 2


async def test_forged_display_frames_are_ignored_or_end_their_execution(provider: SandboxProvider) -> None:
    write = FIND_CHANNEL + "def send(op, body): channel.send({'op': op, 'token': channel.token}, body)\n"
    async with provider.interpreter() as interpreter:
        forged = """
            long, deep = b'{"' + b"a" * 200 + b'":1}', b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"
            for body in (b"[]", b"{}", b"nonsense", long, deep):
                send("display", body)
            send("value", b'["no fields"]')
            SUBMIT(x=1)
            """
        result = await interpreter.execute(write + dedent(forged))
        assert (result.outputs, result.meta.value, result.meta.displays) == ({"x": 1}, None, ())
        with pytest.raises(CodeCrashed, match=r"displays of [\d,]+ bytes"):
            await interpreter.execute(write + "while True: send('display', b'{\"a\":\"' + b'x' * 1_000_000 + b'\"}')")
        assert (await interpreter.execute("3")).meta.value == 3
