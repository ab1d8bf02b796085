"""Tests that NaN and infinities reach code and return from it unchanged."""

import json
import math
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

NAN, INF = math.nan, math.inf
VALUES: list[Any] = [NAN, INF, -INF, [0.5, NAN], {"a/b": {"~": [None, [INF]]}, "": -INF, "c": (1, NAN)}, [[]], None]


def show(value: Any) -> str:
    """Return the value as text, in which two NaN values are equal."""
    return json.dumps(value, sort_keys=True)


async def test_nonfinite_numbers_arrive_and_come_back(interpreter: Interpreter) -> None:
    variables = {"loss": NAN, "values": VALUES}
    result = await interpreter.execute("SUBMIT(values, best=-float('inf'), loss=loss)", variables)
    assert show(result.outputs) == show({"output": VALUES, "best": -INF, "loss": NAN})
    assert show(result.meta.variables) == show(variables)


async def test_nonfinite_numbers_in_long_lists_arrays_and_classes_come_back(interpreter: Interpreter) -> None:
    code = """
        from array import array
        from enum import Enum
        class Color(str, Enum):
            RED = "red"
        class Odd(float):
            def __float__(self): return 3.0
            def __sub__(self, other): raise KeyError(other)
            def __repr__(self): return "odd"
        SUBMIT(array=array("d", [1.5, float("nan"), float("-inf")]), scores={Color.RED: float("nan")},
               odd=[Odd("inf"), Odd(1.5)], long=[float("nan"), 0.5] * 20_000)
        """
    outputs = (await interpreter.execute(dedent(code))).outputs
    expected = {"array": [1.5, NAN, -INF], "scores": {"red": NAN}, "odd": [INF, 1.5], "long": [NAN, 0.5] * 20_000}
    assert show(outputs) == show(expected)


async def test_only_a_float_field_may_be_nonfinite(interpreter: Interpreter) -> None:
    code = "SUBMIT(float('nan'))"
    assert math.isnan((await interpreter.execute(code, output_fields=[{"name": "x", "type": "float"}])).x)
    with pytest.raises(SubmitError, match="must be int, not float"):
        await interpreter.execute(code, output_fields=[{"name": "x", "type": "int"}])


@pytest.mark.full
async def test_names_of_nonfinite_numbers_count_towards_the_size_limit(interpreter: Interpreter) -> None:
    with pytest.raises(SubmitError, match="save_to_volume"):
        await interpreter.execute("SUBMIT(x=[float('nan')] * 60_000)")


async def test_a_ledger_stores_null_and_the_nonfinite_number_beside_it(interpreter: Interpreter) -> None:
    wrappers: tuple[Callable[[Any], Any], ...] = (
        lambda value: value, lambda value: [value], lambda value: {"a/b~c": [1, value]}
    )  # fmt: skip
    for wrap in wrappers:
        result = await interpreter.execute("SUBMIT(x=x)", {"x": wrap(NAN), "y": -INF})
        data = json.loads(json.dumps(outcome_to_json(result), allow_nan=False))
        assert show(data["outputs"]) == show({"x": wrap(None)})
        assert list(data["nonfinite"].values()) == ["nan"]
        assert data["meta"]["nonfinite"] == {**data["nonfinite"], "/y": "-inf"}
        again = outcome_from_json(data)
        assert show(again.outputs) == show(result.outputs)  # type: ignore[union-attr]
        assert show(again.meta.variables) == show(result.meta.variables)
    assert "nonfinite" not in json.dumps(outcome_to_json(await interpreter.execute("SUBMIT(x=[x, None])", {"x": 0.5})))
