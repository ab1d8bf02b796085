"""Tests of SUBMIT when the host specifies the fields."""

from typing import Any

import pytest

from rlm_batch import SubmitError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

FIELDS = [{"name": "answer", "type": "str"}, {"name": "score", "type": "float"}, {"name": "notes"}]


async def test_positional_and_named_values_come_back_in_field_order(interpreter: Interpreter) -> None:
    result = await interpreter.execute("SUBMIT('yes', 0.5, None)", output_fields=FIELDS)
    assert result.outputs == {"answer": "yes", "score": 0.5, "notes": None}
    result = await interpreter.execute("SUBMIT('yes', notes=[1], score=1)", output_fields=FIELDS)
    assert list(result.outputs.items()) == [("answer", "yes"), ("score", 1), ("notes", [1])]


WRONG = [
    ("'yes', 0.5", "missing: notes"),
    ("", "missing: answer, score, notes"),
    ("'yes', 0.5, 1, 2", "4 positional"),
    ("'yes', 0.5, 1, other=2", "no field 'other'"),
    ("'yes', 0.5, 1, answer='no'", "'answer' by position and by name"),
    ("5, 0.5, 1", "'answer' must be str, not int"),
    ("'yes', 'high', 1", "'score' must be float, not str"),
    ("'yes', True, 1", "'score' must be float, not bool"),
    ("None, 0.5, 1", "'answer' must be str, not NoneType"),
]

TYPES = [
    ("str", "''", "1"),
    ("int", "1", "1.0"),
    ("int", "1", "True"),
    ("float", "1", "'1'"),
    ("bool", "False", "0"),
    ("list", "(1, 2)", "{}"),
    ("dict", "{}", "[]"),
]


async def test_wrong_fields_raise_an_error_that_names_them(interpreter: Interpreter) -> None:
    for arguments, said in WRONG:
        with pytest.raises(SubmitError) as caught:
            await interpreter.execute(f"SUBMIT({arguments})", output_fields=FIELDS)
        assert said in str(caught.value)
    for kind, right, wrong in TYPES:
        fields: list[dict[str, Any]] = [{"name": "x", "type": kind}]
        await interpreter.execute(f"SUBMIT(x={right})", output_fields=fields)
        with pytest.raises(SubmitError, match=f"must be {kind}"):
            await interpreter.execute(f"SUBMIT(x={wrong})", output_fields=fields)


async def test_each_execution_of_a_context_has_separate_output_fields(interpreter: Interpreter) -> None:
    first = await interpreter.execute("SUBMIT(1)", context="c", output_fields=[{"name": "a"}])
    second = await interpreter.execute("SUBMIT(2)", context="c", output_fields=[{"name": "b"}])
    third = await interpreter.execute("SUBMIT(3)", context="c")
    assert [first.outputs, second.outputs, third.outputs] == [{"a": 1}, {"b": 2}, {"output": 3}]
