"""Tests of arrays and their numbers, from numpy and pandas, as submitted values and as variables."""

import re
import sysconfig
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, LocalInterpreter, SubmitError, batch, sweep
from rlm_batch.sandbox.interpreter import Interpreter

# Tests import these packages where they need them. An import at the top would cost each test process a second.
IMPORTS = f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\n"
IMPORTS += "import decimal, json\nimport numpy as np, pandas as pd, pyarrow as pa\n"
EXACT = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
LARGE = [2**63 - 1, -(2**63), 2**53 + 1]


@pytest.fixture(scope="module")
def scientist() -> Iterator[LocalInterpreter]:
    """Yield an interpreter whose code finds this environment's packages."""
    with LocalInterpreter(isolation="none") as interpreter:
        interpreter.execute(IMPORTS)
        yield interpreter


VALUES: list[tuple[str, Any]] = [
    (f"np.array({EXACT})", EXACT),
    (f"np.array({EXACT})[1]", EXACT[1]),
    (f"np.array({LARGE})", LARGE),
    ("np.int64(2**63 - 1)", 2**63 - 1),
    ("np.uint64(2**64 - 1)", 2**64 - 1),
    ("np.float32(0.1)", 0.10000000149011612),
    ("np.bool_(True)", True),
    ("np.str_('é')", "é"),
    ("np.zeros((2, 3, 0))", [[[], [], []], [[], [], []]]),
    ("np.array(7)", 7),
    ("np.array([{'a': [np.float64(1)]}], dtype=object)", [{"a": [1.0]}]),
    ("{'scores': [np.mean([1, 2]), (np.int8(3),)]}", {"scores": [1.5, [3]]}),
    ("pd.Series([1, 2], dtype='Int64')", [1, 2]),
    ("pd.Series(['a', None], dtype=object)", ["a", None]),
    ("pd.Index(['x', 'y'])", ["x", "y"]),
    ("pd.DataFrame({'a': [1, 2]})['a'].value_counts().index", [1, 2]),
    ("pd.Categorical(['x', 'y'])", ["x", "y"]),
    ("np.ma.array([1, 2])", [1, 2]),
    ("pa.array([1, None])", [1, None]),
    ("pa.array(['x']).dictionary_encode()", ["x"]),
    ("np.array([(1, 2.0)], [('a', 'i4'), ('b', 'f8')])", [[1, 2.0]]),
]
# Values that would lose something as a list, and what the error says to use.
LOSING: list[tuple[str, str]] = [
    ("pd.Series(['a', 'b', 'a']).value_counts()", "with an index, which a list would lose: use to_dict(), or tolist()"),
    ("pd.DataFrame({'k': ['x', 'y'], 'v': [1, 2]}).groupby('k').v.mean()", "use to_dict(), or tolist()"),
    ("np.array(['2026-01-02', 'NaT'], 'M8[ns]')", "(datetime64[ns]), which is not JSON: use astype(str)"),
    ("np.timedelta64(5, 'Y')", "use astype(str)"),
    ("pd.Series(pd.to_datetime(['2026-01-02', None], utc=True))", "use astype(str)"),
    ("pd.period_range('2026-01', periods=1, freq='M')", "[0] is a Period, which is not JSON: use "),
    ("pd.Series([1, None], dtype='Int64')", "[1] is a NAType, which is not JSON: use "),
    ("pd.NA", "is a NAType, which is not JSON: use "),
    ("np.longdouble(1)", "is a longdouble, which is not JSON: use numbers, text, lists and dicts"),
    ("np.array([1 + 2j])", "[0] is a complex, which is not JSON: use numbers, text, lists and dicts"),
    ("np.array([b'x', b'y'])", "[0] is a bytes, which is not JSON: use numbers, text, lists and dicts"),
    ("np.array([decimal.Decimal('1.10'), 3], object)", "[0] is a Decimal, which is not JSON: use numbers, text"),
    ("pd.DataFrame({'a': [1]})", "is a DataFrame, which is not JSON: use {}.to_dict('list')"),
    ("pa.table({'a': [1]})", "is a Table, which is not JSON: use numbers, text, lists and dicts"),
]
REFUSED = [
    ("np.broadcast_to(0, (10**6, 10**6))", "1,000,000,000,000 items"),
    ("np.zeros(400_000)", "write the data to a file that `collect` returns"),
]


def test_code_submits_and_displays_arrays(scientist: LocalInterpreter) -> None:
    for text, value in VALUES:
        result = scientist.execute(f"SUBMIT({text}, again={text})").outputs
        assert repr(result) == repr({"output": value, "again": value}), text  # compares -0.0 and types too
    assert scientist.execute("np.arange(3) / 2").meta.value == [0.0, 0.5, 1.0]
    meta = scientist.execute("pd.DataFrame({'a': [1, 2]})").meta
    assert (meta.value, meta.value_repr) == (None, "   a\n0  1\n1  2")
    assert "<table" in meta.displays[0]["text/html"]


@pytest.mark.parametrize("way", ["submit", "last value", "tool", "variable"])
def test_an_array_that_a_list_cannot_hold_is_refused(scientist: LocalInterpreter, way: str) -> None:
    scientist.tools["keep"] = lambda value: value
    names: dict[str, Any] = {}
    exec(IMPORTS, names)
    for text, words in LOSING:
        code = f"loss = {text}\n"
        if way == "last value":
            meta = scientist.execute(code + "loss").meta
            assert (meta.value, bool(meta.value_repr)) == (None, True), text
            continue
        exec(code, names)
        code, variables, place = {
            "submit": (code + "SUBMIT(loss=loss)", {}, "loss"),
            "tool": (code + "keep(loss)", {}, "args[0]"),
            "variable": ("SUBMIT(loss)", {"loss": names["loss"]}, "loss"),
        }[way]
        with pytest.raises((CodeError, SubmitError, ConfigurationError)) as refused:
            scientist.execute(code, variables)
        assert words.replace("{}", place) in str(refused.value), text


def test_a_reported_value_must_convert_to_a_number_without_loss(scientist: LocalInterpreter) -> None:
    complex_numbers = ("np.complex64(1 + 2j)", "np.complex128(1)")
    for value in ("np.timedelta64(5, 'ns')", "np.datetime64('2026-01-02', 'ns')", *complex_numbers):
        with pytest.raises(CodeError, match=r"report: value is a .*: it is a number"):
            scientist.execute(f"report({value}, 0)")
    assert scientist.execute("report(np.float32(0.5), np.int64(3))").meta.reports == ((3, 0.5),)


def test_an_array_that_is_too_large_is_refused(scientist: LocalInterpreter) -> None:
    for text, message in REFUSED:
        with pytest.raises(SubmitError, match=message):
            scientist.execute(f"SUBMIT(fine=1, loss={text})")


def test_typed_fields_accept_numbers_of_arrays(scientist: LocalInterpreter) -> None:
    fields = [{"name": "acc", "type": "float"}, {"name": "curve", "type": "list"}]
    result = scientist.execute("SUBMIT(np.float32(0.5), np.arange(2))", output_fields=fields)
    assert result.outputs == {"acc": 0.5, "curve": [0, 1]}


def test_variables_tool_arguments_and_tool_results_may_be_arrays(scientist: LocalInterpreter) -> None:
    import numpy

    received: list[Any] = []

    def double(values: list[int]) -> Any:
        received.append(values)
        return 2 * numpy.array(values)

    scientist.tools["double"] = double
    variables = {"x": numpy.arange(3), "y": {"z": [numpy.float64(0.1)]}}
    result = scientist.execute("SUBMIT(x=double(np.array(x)), y=y)", variables)
    assert result.outputs == {"x": [0, 2, 4], "y": {"z": [0.1]}}
    assert result.meta.variables == {"x": [0, 1, 2], "y": {"z": [0.1]}}
    assert received == [[0, 1, 2]]
    assert type(received[0]) is list


@pytest.mark.anyio
@pytest.mark.local_first
async def test_every_sandbox_accepts_values_with_tolist(interpreter: Interpreter) -> None:
    result = await interpreter.execute("from array import array\nSUBMIT(array('d', x))", {"x": array("d", [0.5, 2])})
    assert result.outputs == {"output": [0.5, 2.0]}


@pytest.mark.full
@pytest.mark.anyio
async def test_a_sweep_and_a_batch_accept_arrays_and_generators(server: str) -> None:
    import numpy

    report = await sweep("SUBMIT(loss=x)", grid={"x": numpy.linspace(0, 1, 3), "n": range(2)}, provider="local:none")
    assert [(trial.meta.variables["x"], trial.meta.variables["n"]) for trial in report.trials] == [
        (x, n) for x in (0.0, 0.5, 1.0) for n in (0, 1)
    ]
    inputs = ({"x": value} for value in numpy.arange(3))
    results = await batch("SUBMIT(y=x * x)", inputs=inputs, provider="local:none")  # type: ignore[arg-type]
    assert [result["y"] for result in results] == [0, 1, 4]


@pytest.mark.anyio
async def test_a_value_that_a_flow_cannot_send_is_refused_before_it_runs() -> None:
    message = "inputs[0]['x'] is a set, which is not JSON: use numbers, text, lists and dicts"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        await batch("SUBMIT()", inputs=[{"x": {1}}], provider="local:none")
