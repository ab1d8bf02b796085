"""DataFrames in and out: tables of pandas, polars and pyarrow as inputs, and results as lists with a report."""

import copy
import datetime
import decimal
import json
import pickle
import subprocess
import sys
import zoneinfo
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from rlm_batch import ConfigurationError, Failure, OutcomesReport, batch, load_report
from rlm_batch.flows.plans.batch import BatchParameters
from rlm_batch.flows.plans.chunks import ChunksParameters
from rlm_batch.flows.plans.sweep import SweepParameters

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
NOON = datetime.datetime.fromisoformat("2026-01-02T12:00:00")
COLUMNS: dict[str, list[Any]] = {
    "n": [1, 2],
    "x": [0.5, float("nan")],
    "name": ["a", None],
    "at": [NOON, None],
    "day": [NOON.date(), None],
    "ok": [True, False],
    "parts": [[1, 2], []],
    "point": [{"lat": 1.5}, {"lat": 2.5}],
}
NAMES = ("n", "x", "name", "at", "day", "ok", "parts", "point")
ROWS = [
    dict(zip(NAMES, (1, 0.5, "a", "2026-01-02T12:00:00", "2026-01-02", True, [1, 2], {"lat": 1.5}), strict=True)),
    dict(zip(NAMES, (2, None, None, None, None, False, [], {"lat": 2.5}), strict=True)),
]


def test_a_data_frame_goes_in_and_comes_back_with_the_results() -> None:
    frame = pandas.DataFrame({"x": [1, 2, 3], "name": ["a", "b", "c"]})
    results = batch.sync("SUBMIT(y=x * x)", inputs=frame[frame.x > 1])
    assert results.to_dataframe()[["x", "name", "y"]].values.tolist() == [[2, "b", 4], [3, "c", 9]]


def make_tables() -> list[Any]:
    polars: Any = pytest.importorskip("polars")
    table = pyarrow.table(COLUMNS)
    return [pandas.DataFrame(COLUMNS), polars.DataFrame(COLUMNS), table, table.to_batches()[0]]


def test_tables_of_pandas_polars_and_pyarrow_become_the_same_rows() -> None:
    for table in make_tables():
        rows: Any = BatchParameters.parse({"code": "SUBMIT()", "inputs": table}).inputs
        assert rows == ROWS
        assert json.dumps(rows) == json.dumps(ROWS)  # 1 and not True or numpy's 1
        assert SweepParameters.parse({"code": "SUBMIT()", "points": table}).points == ROWS
        assert ChunksParameters.parse({"code": "SUBMIT()", "data": table, "chunk_size": 1}).data == ROWS


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
# Columns of pyarrow by name: the values, their type, and the values of the variables, or None for a refusal.
CELLS: dict[str, tuple[list[Any], Any, list[Any] | None]] = {
    "int": ([1, None], "int64", [1, None]),
    "big": ([2**64 - 1, 0], "uint64", [2**64 - 1, 0]),
    "float": ([0.5, float("nan"), float("inf")], "float64", [0.5, None, float("inf")]),
    "short": ([0.1, None], "float32", [0.10000000149011612, None]),
    "bool": ([True, None], "bool", [True, None]),
    "text": (["01234", "1e5", None], "string", ["01234", "1e5", None]),
    "category": (["b", "a", "b"], pyarrow.dictionary("int8", "string"), ["b", "a", "b"]),
    "day": ([NOON.date(), None], "date32", ["2026-01-02", None]),
    "hour": ([datetime.time(1, 2, 3), None], pyarrow.time64("ns"), ["01:02:03", None]),
    "naive": ([NOON, None], pyarrow.timestamp("ns"), ["2026-01-02T12:00:00", None]),
    "zone": ([NOON.replace(tzinfo=BERLIN)], pyarrow.timestamp("ns", "Europe/Berlin"), ["2026-01-02T12:00:00+01:00"]),
    "milli": ([NOON.replace(microsecond=250000)], pyarrow.timestamp("ms"), ["2026-01-02T12:00:00.250000"]),
    "times": ([[NOON], [], None], pyarrow.list_(pyarrow.timestamp("us")), [["2026-01-02T12:00:00"], [], None]),
    "days": ([[NOON.date(), None]], pyarrow.list_(pyarrow.date32()), [["2026-01-02", None]]),
    "nanos in a list": ([[1767355200000000001]], pyarrow.list_(pyarrow.timestamp("ns")), None),
    "floats": ([[0.5, float("nan")]], pyarrow.list_(pyarrow.float64()), [[0.5, None]]),
    "struct": ([{"a": 1, "b": None}], pyarrow.struct({"a": "int64", "b": "string"}), [{"a": 1, "b": None}]),
    "nanos": ([1767355200000000001], pyarrow.timestamp("ns"), None),
    "bytes": ([b"x"], "binary", None),
    "decimal": ([decimal.Decimal("1.50")], pyarrow.decimal128(5, 2), None),
    "duration": ([datetime.timedelta(1)], pyarrow.duration("us"), None),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_column_gives_the_same_values_by_every_route(name: str, tmp_path: Path) -> None:
    polars: Any = pytest.importorskip("polars")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    values, kind, expected = CELLS[name]
    table = pyarrow.table({name: pyarrow.array(values, kind)})
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "in.parquet", tmp_path / "folder" / "in.parquet"):
        parquet.write_table(table, path)
    is_nullable = name in ("int", "bool")  # pandas' own dtypes hold no missing values
    frame = table.to_pandas(types_mapper=pandas.ArrowDtype) if is_nullable else table.to_pandas()
    routes: list[Any] = [table, table.to_batches()[0], polars.from_arrow(table)]
    routes += [tmp_path / "in.parquet", tmp_path / "folder", frame]
    for route in routes:
        with nullcontext() if expected else pytest.raises(ConfigurationError, match=f"column '{name}' of "):
            rows = [
                variables for _, variables in BatchParameters.parse({"code": "", "inputs": route}).make_plan().items
            ]
            assert json.dumps(rows) == json.dumps([{name: value} for value in expected or ()]), type(route)


def test_types_that_only_pandas_has_are_refused_by_every_route(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"x": pandas.period_range("2026", periods=2)})
    frame.to_parquet(tmp_path / "in.parquet")
    for route in (frame, tmp_path / "in.parquet"):
        with pytest.raises(ConfigurationError, match=r"column 'x' of .*[Pp]eriod"):
            BatchParameters.parse({"code": "", "inputs": route}).make_plan()


def test_missing_cells_of_every_dtype_become_none() -> None:
    frame = pandas.DataFrame(
        {
            "i": pandas.array([1, None], dtype="Int64"),
            "f": pandas.array([1.5, float("nan")], dtype="float32"),
            "b": pandas.array([True, None], dtype="boolean"),
            "s": pandas.array(["a", None], dtype="string"),
            "c": pandas.Categorical(["u", None]),
            "t": pandas.to_datetime(["2026-01-02T12:00:00.25Z", None], format="ISO8601"),
            "list": [["x", pandas.NA], None],
        }
    )
    inputs: Any = BatchParameters.parse({"code": "SUBMIT()", "inputs": frame}).inputs
    first, second = inputs
    assert first.pop("t") == "2026-01-02T12:00:00.250000+00:00"
    assert first == {"i": 1, "f": 1.5, "b": True, "s": "a", "c": "u", "list": ["x", None]}
    assert set(second.values()) == {None}


WRONG_TABLES = [
    ("pandas.DataFrame({'x': [1]}).rename_axis('id')", r"the index id, .*: use inputs\.reset_index\(\)$"),
    ("pandas.DataFrame([[1, 2]], columns=['a', 'a'])", "two columns 'a': rename one of them"),
    ("pyarrow.table([[1], [2]], names=['a', 'a'])", "two columns 'a': rename one of them"),
    ("pyarrow.table({'x': [1], '__index_level_0__': [1]})", "__index_level_0__ is pandas' index: save without it"),
    (
        "pyarrow.table({'x': pyarrow.array([[(1, 2)]], pyarrow.map_('int8', 'int8'))})",
        "'x' of inputs has the type dict",
    ),
    ("pandas.DataFrame({'x': pandas.to_datetime([1])})", "'x' of inputs has times with nanoseconds"),
    ("pandas.DataFrame({'x': [b'raw']})", "column 'x' of inputs has the type bytes, .*: cast it to a number or text"),
    ("pandas.DataFrame({'x': pandas.to_timedelta(['1s'])})", "column 'x' of inputs has the type Timedelta"),
    ("pandas.DataFrame({'learning rate': [1]})", "rename it"),
    ("pandas.DataFrame({'x': []})", "inputs has no rows"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_TABLES)
def test_a_table_that_rows_cannot_hold_is_refused_with_its_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        BatchParameters.parse({"code": "SUBMIT()", "inputs": eval(text)}).make_plan()
    assert "\n" not in str(raised.value)


def test_a_list_of_inputs_imports_no_data_frames() -> None:
    program = (
        "import sys\nfrom rlm_batch.flows.plans.batch import BatchParameters\n"
        "BatchParameters.parse({'code': 'SUBMIT()', 'inputs': [{'x': 1}]}).make_plan()\n"
        "print([name for name in ('pandas', 'polars', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def outcomes() -> OutcomesReport:
    """Return the outcomes of a batch in which the second of three executions failed."""
    return batch.sync("SUBMIT(y=1 / x)", [{"x": 1}, {"x": 0}, {"x": 4}], on_failure="return")


def test_a_batch_returns_a_list_with_its_report(outcomes: OutcomesReport) -> None:
    assert issubclass(type(outcomes), list)
    assert [len(outcomes), outcomes[0].y, outcomes[-1].y] == [3, 1.0, 0.25]
    assert [type(outcome) for outcome in outcomes[1:2]] == [Failure]
    assert outcomes == [*outcomes]
    assert list(outcomes.failures) == [outcomes[1]]
    assert outcomes.summary() == (
        "2 of 3 executions succeeded, 1 failed\n1 execution (1, x=0): ZeroDivisionError (line 1): division by zero"
    )
    assert str(outcomes).splitlines()[1].split() == ["0", "1", "1"]
    report = load_report(outcomes.results_path)
    assert [outcome.meta.index for outcome in report] == [0, 1, 2]
    assert (len(report), report[2].y, report.summary()) == (3, 0.25, outcomes.summary())


def test_the_list_can_be_copied_pickled_and_written_as_json(outcomes: OutcomesReport) -> None:
    for other in (copy.copy(outcomes), pickle.loads(pickle.dumps(outcomes))):
        assert isinstance(other, OutcomesReport)
        assert (other[0], other.results_path, len(other)) == (outcomes[0], outcomes.results_path, 3)
    text = json.dumps(outcomes, default=lambda outcome: getattr(outcome, "outputs", None))
    assert json.loads(text) == [{"y": 1.0}, None, {"y": 0.25}]


def test_prefect_persists_the_list_and_passes_it_to_tasks(outcomes: OutcomesReport) -> None:
    @task(persist_result=True)
    def take(results: OutcomesReport) -> OutcomesReport:
        return results

    @flow
    def pass_on() -> Any:
        state: Any = take.submit(outcomes)
        state.wait()
        return state.state.result()

    passed = pass_on()
    assert (type(passed), passed[0], passed.results_path) == (type(outcomes), outcomes[0], outcomes.results_path)
