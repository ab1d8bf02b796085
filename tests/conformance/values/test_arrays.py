"""Arrays and their numbers are values: numpy's and pandas', in what code submits and in what it is given."""

import sysconfig
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalInterpreter, SubmitError, batch, sweep
from rlm_batch.sandbox.interpreter import Interpreter

# Tests import them where they need them: at the top they would cost each test process a second.
IMPORTS = f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\nimport numpy as np, pandas as pd\n"
EXACT = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
LARGE = [2**63 - 1, -(2**63), 2**53 + 1]


@pytest.fixture(scope="module")
def scientist() -> Iterator[LocalInterpreter]:
    """An interpreter whose code finds this environment's packages."""
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
]
REFUSED = [
    ("np.datetime64('2026-01-01')", "is a date, which is not JSON"),
    ("np.array([1j])", r"loss\[0\] is a complex"),
    ("np.array([b'x'])", r"loss\[0\] is bytes"),
    ("np.longdouble(1)", r"float\(loss\)"),
    ("pd.DataFrame({'a': [1]})", r"loss\.to_dict\('list'\)"),
    ("pd.Series([pd.NA])", r"loss\[0\] is a NAType"),
    ("np.broadcast_to(0, (10**6, 10**6))", "1,000,000,000,000 items"),
    ("np.zeros(400_000)", "bytes of JSON, more than"),
]


def test_code_submits_an_array_as_it_is_and_shows_one(scientist: LocalInterpreter) -> None:
    for text, value in VALUES:
        result = scientist.execute(f"SUBMIT({text}, again={text})").outputs
        assert repr(result) == repr({"output": value, "again": value}), text  # -0.0 and types too
    assert scientist.execute("np.arange(3) / 2").meta.value == [0.0, 0.5, 1.0]
    meta = scientist.execute("pd.DataFrame({'a': [1, 2]})").meta
    assert (meta.value, meta.value_repr) == (None, "   a\n0  1\n1  2")
    assert "<table" in meta.displays[0]["text/html"]


def test_what_is_no_json_in_an_array_is_named(scientist: LocalInterpreter) -> None:
    for text, message in REFUSED:
        with pytest.raises(SubmitError, match=message):
            scientist.execute(f"SUBMIT(fine=1, loss={text})")


def test_fields_that_have_a_type_take_an_arrays_number(scientist: LocalInterpreter) -> None:
    fields = [{"name": "acc", "type": "float"}, {"name": "curve", "type": "list"}]
    result = scientist.execute("SUBMIT(np.float32(0.5), np.arange(2))", output_fields=fields)
    assert result.outputs == {"acc": 0.5, "curve": [0, 1]}


def test_variables_and_what_tools_take_and_return_may_be_arrays(scientist: LocalInterpreter) -> None:
    import numpy

    given: list[Any] = []

    def double(values: list[int]) -> Any:
        given.append(values)
        return 2 * numpy.array(values)

    scientist.tools["double"] = double
    variables = {"x": numpy.arange(3), "y": {"z": [numpy.float64(0.1)]}}
    result = scientist.execute("SUBMIT(x=double(np.array(x)), y=y)", variables)
    assert result.outputs == {"x": [0, 2, 4], "y": {"z": [0.1]}}
    assert result.meta.variables == {"x": [0, 1, 2], "y": {"z": [0.1]}}
    assert given == [[0, 1, 2]]
    assert type(given[0]) is list


@pytest.mark.anyio
@pytest.mark.local_first
async def test_every_sandbox_takes_what_has_a_tolist(interpreter: Interpreter) -> None:
    result = await interpreter.execute("from array import array\nSUBMIT(array('d', x))", {"x": array("d", [0.5, 2])})
    assert result.outputs == {"output": [0.5, 2.0]}


@pytest.mark.full
@pytest.mark.anyio
async def test_a_sweep_and_a_batch_take_arrays_and_generators(server: str) -> None:
    import numpy

    report = await sweep("SUBMIT(loss=x)", grid={"x": numpy.linspace(0, 1, 3), "n": range(2)}, provider="local:none")
    assert [(trial.meta.variables["x"], trial.meta.variables["n"]) for trial in report.trials] == [
        (x, n) for x in (0.0, 0.5, 1.0) for n in (0, 1)
    ]
    inputs = ({"x": value} for value in numpy.arange(3))
    results = await batch("SUBMIT(y=x * x)", inputs=inputs, provider="local:none")  # type: ignore[arg-type]
    assert [result["y"] for result in results] == [0, 1, 4]


@pytest.mark.anyio
async def test_what_a_flow_cannot_send_is_a_sentence_before_anything_runs() -> None:
    import pandas

    for value, message in (
        ([{"x": {1}}], r"inputs\[0\]\['x'\] is a set"),
        (pandas.DataFrame({"x": [1]}), r"inputs\.to_dict\('list'\) or inputs\.to_dict\('records'\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            await batch("SUBMIT()", inputs=value, provider="local:none")  # type: ignore[arg-type]
