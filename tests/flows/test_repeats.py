"""Repeats: each input, point or chunk runs several times, and the report groups the results."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, Failure, Result, SandboxLost, batch, chunks, load_report, sweep
from rlm_batch.flows.reporting.export import write_csv
from rlm_batch.flows.reporting.groups import aggregate_group, describe_numbers, is_incomplete
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_summary_rows
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import ReportSpec, RunRecord

from ..infra.execution_counter import COUNT_EXECUTION, ExecutionCounter

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"provider": "local:none", "reuse_sandboxes": True, "executions_per_task": 4}
# The first repeat of x=1 is the luckiest of all, but x=0 has the better mean.
LUCKY = "SUBMIT(loss=(-5.0 if x == 1 and repeat == 0 else 10.0) if x else repeat / 10, ok=repeat > 0, name='a')"
SLOW = COUNT_EXECUTION + "count_execution(x)\nSUBMIT(y=x)"


async def run_sweep(*arguments: Any, **parameters: Any) -> Any:
    """Return the report of a sweep as Any, because its results have the fields that the code submits."""
    return await sweep(*arguments, **{**OPTIONS, **parameters})


async def test_the_best_point_has_the_best_mean_and_not_the_luckiest_repeat() -> None:
    report = await run_sweep(LUCKY, {"x": [1, 0]}, objective="loss", repeats=5)
    assert report.best.meta.variables == {"x": 0}
    assert [trial.meta.repeat for trial in report.trials] == [0, 1, 2, 3, 4] * 2
    values = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert report.best.loss == pytest.approx(statistics.mean(values))
    expected = {"count": 5, "mean": 0.2, "std": statistics.stdev(values), "min": 0.0, "max": 0.4}
    expected["se"] = expected["std"] / math.sqrt(5)
    assert {name: report.best[f"loss.{name}"] for name in expected} == pytest.approx(expected)
    assert (report.best.ok, report.best.name) == (0.8, "a")
    assert report.rows()[0] == [
        *("", "x", "loss", "loss.count", "loss.std", "loss.se", "loss.min", "loss.max"),
        *("ok", "ok.count", "ok.std", "ok.se", "ok.min", "ok.max", "name", ""),
    ]
    assert [row[-1] for row in report.rows()[1:]] == ["", "best"]


@pytest.mark.parametrize(("aggregate", "best"), [("mean", 0), ("median", 0), ("min", 1), ("max", 0)])
async def test_the_aggregate_decides_which_point_is_best(aggregate: Any, best: int) -> None:
    report = await run_sweep(LUCKY, {"x": [0, 1]}, objective="loss", repeats=3, aggregate=aggregate)
    assert report.best.meta.variables == {"x": best}
    assert load_report(report.results_path).best.loss == report.best.loss


async def test_more_repeats_run_only_the_new_ones(counter: ExecutionCounter, tmp_path: Path) -> None:
    inputs: Any = [{"x": x, "address": counter.address} for x in (1, 2, 2)]
    options: Any = {**OPTIONS, "provider": "local:none", "results_path": str(tmp_path / "run"), "prepare_seed": 3}
    for repeats in (None, 2, 4, 3):
        results = await batch(SLOW, inputs=inputs, repeats=repeats, prepare="pass", **options)
        assert [result.y for result in results] == [x for x in (1, 2, 2) for _ in range(repeats or 1)]
    assert counter.counts == {"1": 4, "2": 8}
    report = load_report(str(tmp_path / "run"))
    assert [(r.meta.group, r.meta.repeat) for r in report.results] == [(g, r) for g in range(3) for r in range(3)]
    assert [(group.y, group["y.count"]) for group in report.groups] == [(1, 3), (2, 3), (2, 3)]
    assert not any("repeat" in result.meta.variables for result in report.results)


async def test_runs_without_repeats_keep_their_keys(tmp_path: Path) -> None:
    keys: list[set[str]] = []
    for repeats in (None, 1):
        await batch(
            "SUBMIT(y=x)", inputs=[{"x": 1}], repeats=repeats, results_path=str(tmp_path / str(repeats)), **OPTIONS
        )
        keys.append({line.key for line in Ledger(tmp_path / str(repeats)).read_lines()})
    assert keys[0] == keys[1]


def return_repeat(repeat: int) -> dict[str, int]:
    return {"y": repeat}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def run():\n    return repeat\nSUBMIT(y=run())", [0, 1]),
        (return_repeat, [0, 1]),
        ("from itertools import repeat\nSUBMIT(y=list(repeat(7, 1))[0])", [7, 7]),
        ("SUBMIT(y='repeat' in globals())", [False, False]),
    ],
)
async def test_code_gets_the_number_of_the_repeat_only_if_it_has_the_name(code: Any, expected: Any) -> None:
    results = await batch(code, repeats=2, **OPTIONS)
    assert [result.y for result in results] == expected


async def test_the_sampler_learns_from_the_aggregate(tmp_path: Path) -> None:
    space: Any = {"x": {"low": 0.0, "high": 1.0}}
    options: Any = {"seed": 1, "objective": "loss", "max_workers": 1, "executions_per_task": 1}
    plain = await run_sweep("SUBMIT(loss=x + 1)", space=space, trials=14, **options)
    noisy = "SUBMIT(loss=x + repeat)"  # the mean of three repeats is x + 1
    repeated = await run_sweep(noisy, space=space, trials=14, repeats=3, **options, results_path=str(tmp_path / "run"))
    points = [trial.meta.variables["x"] for trial in plain.trials]
    assert [trial.meta.variables["x"] for trial in repeated.trials[::3]] == points
    assert repeated.best.meta.variables == plain.best.meta.variables


async def test_a_search_resumes_with_more_repeats_and_more_trials(counter: ExecutionCounter, tmp_path: Path) -> None:
    code = COUNT_EXECUTION + f"address = {counter.address!r}\ncount_execution(x)\nSUBMIT(loss=x)"
    options: Any = {"space": {"x": [1, 2]}, "objective": "loss", "sampler": "random", "seed": 5}
    options |= {"results_path": str(tmp_path / "run")}
    first = await run_sweep(code, trials=4, repeats=2, **options)
    second = await run_sweep(code, trials=6, repeats=3, **options)
    assert sum(counter.counts.values()) == 6 * 3
    assert [trial.loss for trial in second.trials[:12:3]] == [trial.loss for trial in first.trials[::2]]
    groups = load_report(str(tmp_path / "run")).groups
    assert [group.outputs for group in groups] == [group.outputs for group in second.groups]
    assert all(group["loss.count"] == 3 for group in groups)


async def test_repeats_without_a_number_leave_the_statistics_of_the_others_and_the_report_says_so() -> None:
    code = "SUBMIT(loss=None if x and repeat == 1 else x, name=f'{x} {repeat}', none=None)"
    report = await run_sweep(code, {"x": [2, 1, 0]}, objective="loss", repeats=3, direction="maximize")
    assert [(group.loss, group["loss.count"]) for group in report.groups] == [(2, 2), (1, 2), (0, 3)]
    assert report.best.name == ["2 0", "2 1", "2 2"]
    assert report.best.none is None
    assert report.describe().endswith("2 rows have numbers of fewer repeats, because others submitted none.")
    summary = open_run_ledger(report.results_path).summarize()
    (repeats,) = (text for name, text in build_summary_rows(summary, [RunRecord("sweep", "")]) if name == "Repeats")
    assert repeats.endswith(report.describe())
    assert [trial.values for trial in report.study().trials] == [[2.0], [1.0], [0.0]]


def test_a_row_of_repeats_has_the_aggregate_of_their_seconds_and_the_greatest_peak() -> None:
    metas = [Meta(index=i, seconds=2.0 * i, cpu_seconds=1.0 + i, peak_mib=10.0 * i, group=0, repeat=i) for i in (0, 1)]
    outcomes: list[Any] = [Result({"y": 1}, meta) for meta in metas]
    lost = Failure(SandboxLost("gone"), Meta(index=2, group=0, repeat=2))
    named = Result({"a": "x", "a.count": "many"}, Meta(index=0, group=0, repeat=0))
    assert not is_incomplete(named, ReportSpec().with_repeats(2, 1))  # Code chooses the names of fields.
    for members in (outcomes, [*outcomes, lost]):
        row = aggregate_group(members, 0, ReportSpec())
        assert (row.meta.seconds, row.meta.cpu_seconds, row.meta.peak_mib) == (1.0, 1.5, 10.0)


async def test_failed_repeats_leave_the_statistics_of_the_others() -> None:
    code = "assert repeat != 1 or x\nassert x != 2, 'never'\nSUBMIT(loss=x)"
    report = await run_sweep(code, {"x": [0, 1, 2]}, objective="loss", repeats=3, on_failure="return")
    assert [getattr(group, "outputs", {}).get("loss.count") for group in report.groups] == [2, 3, None]
    assert "never" in report.rows()[3][-1]


async def test_chunks_repeat_and_reduce_gets_a_list_for_each_chunk() -> None:
    code, reduce = (
        "SUBMIT(total=sum(data) + repeat)",
        "SUBMIT(kept={k: [f['total'] for f in v] for k, v in results.items()})",
    )
    report: Any = await chunks(code, data=[1, 2, 3, 4], chunk_size=2, repeats=2, reduce=reduce, **OPTIONS)
    assert report.reduction.kept == {"0": [3, 4], "1": [7, 8]}
    assert (report["0"].total, report["1"]["total.max"]) == (3.5, 8)
    assert [outcome.total for outcome in report.outcomes] == [3, 4, 7, 8]


async def test_exports_have_a_row_for_each_repeat(tmp_path: Path) -> None:
    await run_sweep("SUBMIT(y=repeat)", {"x": [5]}, repeats=2, results_path=str(tmp_path / "run"))
    write_csv(open_run_ledger(str(tmp_path / "run")), tmp_path / "run.csv")
    rows = [line.split(",")[:5] for line in (tmp_path / "run.csv").read_text("utf-8-sig").splitlines()]
    assert rows == [["index", "group", "repeat", "x", "y"], ["0", "0", "0", "5", "0"], ["1", "0", "1", "5", "1"]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"grid": {"repeat": [1]}, "repeats": 2}, "the inputs have a variable 'repeat'"),
        ({"grid": {"x": [1]}, "aggregate": "median"}, "`aggregate` needs `repeats`"),
        ({"grid": {"x": [1]}, "repeats": 0}, "repeats"),
        (
            {"space": {"x": {"low": 0.0, "high": 1.0}}, "trials": 2, "pruner": "median", "repeats": 2},
            "exclude each other",
        ),
    ],
)
async def test_repeats_that_do_not_fit_are_refused_with_one_sentence(parameters: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        await run_sweep("report(x, 1)\nSUBMIT(loss=x)", objective="loss", **parameters)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "numbers", [[1.0], [2.0, 2.0], [0.81] * 5, [1e308, 1e308], [1.0, math.inf], [1.0, math.nan], [1e-300, 3e-300]]
)
def test_statistics_of_any_numbers_are_numbers(numbers: list[float]) -> None:
    found = describe_numbers(numbers)
    assert found["count"] == len(numbers)
    if all(map(math.isfinite, numbers)):
        assert found["mean"] == pytest.approx(statistics.mean(numbers), rel=1e-12, abs=0)
        expected = statistics.stdev(numbers) if len(numbers) > 1 else None
        assert found["std"] == (expected if expected is None else pytest.approx(expected, rel=1e-9, abs=0))
    else:
        assert not math.isfinite(found["mean"])
