"""DataFrames in and out: tables of pandas, polars and pyarrow as inputs, and results as lists with a report."""

import copy
import datetime
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from prefect import flow, task

from rlm_batch import ConfigurationError, Failure, OutcomesReport, batch, chunks, load_report, sequence, sweep
from rlm_batch.flows.batch import BatchParameters
from rlm_batch.flows.chunks import ChunksParameters
from rlm_batch.flows.sweep import SweepParameters

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


def test_missing_cells_of_every_dtype_become_none() -> None:
    frame = pandas.DataFrame(
        {
            "i": pandas.array([1, None], dtype="Int64"),
            "f": pandas.array([1.5, float("nan")], dtype="float32"),
            "b": pandas.array([True, None], dtype="boolean"),
            "s": pandas.array(["a", None], dtype="string"),
            "c": pandas.Categorical(["u", None]),
            "t": pandas.to_datetime(["2026-01-02T12:00:00.25Z", None], format="ISO8601"),
        }
    )
    inputs: Any = BatchParameters.parse({"code": "SUBMIT()", "inputs": frame}).inputs
    first, second = inputs
    assert first == {"i": 1, "f": 1.5, "b": True, "s": "a", "c": "u", "t": "2026-01-02T12:00:00.250000+00:00"}
    assert set(second.values()) == {None}


WRONG_TABLES = [
    ("pandas.DataFrame({'x': [1]}).rename_axis('id')", r"the index id, .*: use inputs\.reset_index\(\)$"),
    ("pandas.DataFrame([[1, 2]], columns=['a', 'a'])", "two columns 'a': rename one of them"),
    ("pyarrow.table([[1], [2]], names=['a', 'a'])", "two columns 'a': rename one of them"),
    ("pandas.DataFrame({'x': [b'raw']})", "column 'x' of inputs has the type bytes, .*: cast it to a number or text"),
    ("pandas.DataFrame({'x': pandas.to_timedelta(['1s'])})", "column 'x' of inputs has the type Timedelta"),
    ("pandas.DataFrame({'learning rate': [1]})", "rename it, as to learning_rate"),
    ("pandas.DataFrame({'x': []})", "the list of inputs is empty"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_TABLES)
def test_a_table_that_rows_cannot_hold_is_refused_with_its_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        BatchParameters.parse({"code": "SUBMIT()", "inputs": eval(text)}).make_plan()
    assert "\n" not in str(raised.value)


def test_a_lazy_frame_is_refused_with_its_remedy() -> None:
    polars: Any = pytest.importorskip("polars")
    lazy = polars.DataFrame({"x": [1]}).lazy()
    with pytest.raises(ConfigurationError, match=r": use inputs\.collect\(\)$"):
        BatchParameters.parse({"code": "SUBMIT()", "inputs": lazy})


def test_a_list_of_inputs_imports_no_data_frames() -> None:
    program = (
        "import sys\nfrom rlm_batch.flows.batch import BatchParameters\n"
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
        "2 of 3 executions succeeded\n1 execution (1): ZeroDivisionError (line 1): division by zero"
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


def test_the_other_reports_are_sequences_too() -> None:
    steps = sequence.sync(["x = 1", "SUBMIT(x)"])
    assert (issubclass(type(steps), list), steps.summary(), steps.list_notes()) == (True, "2 of 2 steps succeeded", [])
    swept = sweep.sync("SUBMIT(loss=x)", {"x": [2, 1]}, objective="loss")
    assert ([trial.loss for trial in swept], len(swept), swept[1].loss) == ([2, 1], 2, 1)
    assert swept.summary() == "2 of 2 trials succeeded; best loss 1 in trial 1 with x=1"
    cut = chunks.sync("SUBMIT(n=len(data))", data=[1, 2, 3], chunk_size=2)
    assert ([chunk.n for chunk in cut], len(cut), cut["1"].n) == ([2, 1], 2, 1)
