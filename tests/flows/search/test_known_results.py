"""Known results in `start`: the sampler learns them as Optuna does, and they are not run."""

import csv
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest

from rlm_batch import ConfigurationError, load_report, sweep
from rlm_batch.flows.reporting.export import write_csv, write_parquet
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.search.space import parse_space
from rlm_batch.flows.search.start_rows import StartRows, read_start
from rlm_batch.flows.search.study import derive_seed
from rlm_batch.tasks.ledger.run_record import Objective, ReportSpec

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"provider": "local:none", "reuse_sandboxes": True, "max_workers": 1}
SPACE = {"x": {"low": -5.0, "high": 10.0}, "y": {"low": -5.0, "high": 10.0}}
DISTRIBUTIONS: Any = {name: optuna.distributions.FloatDistribution(-5.0, 10.0) for name in SPACE}
CODE = "SUBMIT(loss=(x - 3) ** 2 + (y - 1) ** 2)"
OPTIONAL: list[Any] = ["-a", "b c", None, "1", 2, [1, 2], True]
LOSS = ReportSpec("trial", (Objective("loss"),))


def compute_loss(x: float, y: float) -> float:
    return (x - 3) ** 2 + (y - 1) ** 2


def make_known_results(seed: int) -> list[dict[str, float]]:
    """Return twenty random points with their losses."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    points = [study.ask(DISTRIBUTIONS).params for _ in range(20)]
    return [{**point, "loss": compute_loss(**point)} for point in points]


def tell_known_results(study: Any, rows: list[dict[str, float]]) -> None:
    for row in rows:
        point = {name: row[name] for name in SPACE}
        study.add_trial(optuna.create_trial(value=row["loss"], params=point, distributions=DISTRIBUTIONS))


def read_rows(start: Any, space: Any, spec: ReportSpec = LOSS) -> StartRows:
    return read_start(start, parse_space(space), spec, "mean")


async def run_sweep(*arguments: Any, **parameters: Any) -> Any:
    return await sweep(*arguments, **{**OPTIONS, **parameters})


async def test_after_known_results_the_points_equal_optunas(tmp_path: Path) -> None:
    rows = make_known_results(0)
    parameters: dict[str, Any] = {"space": SPACE, "objective": "loss", "start": [*rows, {"x": 0.5}]}
    report = await run_sweep(CODE, trials=8, seed=3, results_path=tmp_path / "job", **parameters)
    study = optuna.create_study()
    tell_known_results(study, rows)
    for number in range(8):
        study.sampler = optuna.samplers.TPESampler(seed=derive_seed(3, number), constant_liar=True)
        if number == 0:
            study.enqueue_trial({"x": 0.5})
        trial = study.ask(DISTRIBUTIONS)
        study.tell(trial, compute_loss(**trial.params))
    assert [trial.meta.variables for trial in report.trials] == [trial.params for trial in study.trials[20:]]
    assert report.trials[0].meta.variables["x"] == 0.5
    again = await run_sweep(CODE, trials=10, seed=3, results_path=tmp_path / "job", **parameters)
    assert list(again.trials[:8]) == list(report.trials), "a resumed search has the known results and its own"


@pytest.mark.full
async def test_with_known_results_a_search_is_as_good_as_optuna() -> None:
    ours: list[float] = []
    optunas: list[float] = []
    for seed in range(20):
        rows = make_known_results(seed)
        report = await run_sweep(CODE, space=SPACE, objective="loss", start=rows, trials=15, seed=seed)
        ours.append(report.best.loss)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        tell_known_results(study, rows)
        study.optimize(
            lambda trial: compute_loss(**{name: trial.suggest_float(name, -5.0, 10.0) for name in SPACE}), 15
        )
        optunas.append(min(trial.values[0] for trial in study.trials[20:]))
    print("median best:", statistics.median(ours), "Optuna:", statistics.median(optunas))
    assert statistics.median(ours) <= statistics.median(optunas)


@pytest.mark.parametrize("kind", ["csv", "raw csv", "parquet"])
async def test_an_export_of_an_earlier_run_has_its_points_and_results(kind: str, tmp_path: Path) -> None:
    space: Any = [
        {"x": {"low": 0.0, "high": 1.0}, "seconds": {"low": 1, "high": 9}, "opt": OPTIONAL},
        {"y": ["p", "q"], "n": {"low": 1, "high": 64, "log": True}},
    ]  # fmt: skip
    code = """
names = globals()
if names.get("seconds") == 3:
    raise ValueError("three")
SUBMIT(loss=names.get("x", 0.5) ** 2, seconds=2, x=1)
"""
    first = await run_sweep(
        code, space=space, trials=40, objective="loss", results_path=tmp_path / "job", on_failure="return"
    )
    file, reader = tmp_path / f"results.{kind.split()[-1]}", open_run_ledger(str(tmp_path / "job"))
    write_parquet(reader, file) if kind == "parquet" else write_csv(reader, file, raw=kind == "raw csv")
    rows = read_rows(str(file), space)
    succeeded = [trial for trial in first.trials if not hasattr(trial, "error")]
    assert [result.meta.variables for result in rows.known] == [trial.meta.variables for trial in succeeded]
    assert [result.outputs for result in rows.known] == [{"loss": trial.loss} for trial in succeeded]
    assert (rows.points, rows.left_out) == ((), 40 - len(succeeded))
    assert 0 < rows.left_out < 20
    by_seconds = read_rows(str(file), space, ReportSpec("trial", (Objective("seconds"),)))
    assert {result.outputs["seconds"] for result in by_seconds.known} == {2.0}, "the field, and not the run time"
    report = await run_sweep(code, space=space, trials=2, objective="loss", start=file, on_failure="return")
    assert len(report.trials) == 2


async def test_pruned_trials_of_an_export_are_pruned_and_repeats_are_one_result(tmp_path: Path) -> None:
    code = "for step in range(4):\n    report(x, step)\nSUBMIT(loss=x)"
    space: Any = {"x": {"low": 0.0, "high": 1.0}}
    pruned = await run_sweep(
        code, space=space, trials=12, objective="loss", pruner="median(n_startup_trials=2)", sampler="random",
        results_path=tmp_path / "pruned",
    )  # fmt: skip
    write_csv(open_run_ledger(str(tmp_path / "pruned")), tmp_path / "pruned.csv")
    states = [result.meta.pruned for result in read_rows(str(tmp_path / "pruned.csv"), space).known]
    assert states == [trial.meta.pruned for trial in pruned.trials]
    assert set(states) == {True, False}
    assert [trial.state.name == "PRUNED" for trial in pruned.study().trials] == states
    repeated = await run_sweep(
        "SUBMIT(loss=x + repeat)",
        space=space,
        trials=3,
        repeats=4,
        objective="loss",
        results_path=tmp_path / "repeated",
    )
    write_csv(open_run_ledger(str(tmp_path / "repeated")), tmp_path / "repeated.csv")
    points = repeated.points_to_dataframe()
    assert [*points.columns[:3], len(points)] == ["index", "x", "loss", 3]
    assert list(points["loss.count"]) == [4, 4, 4]
    again = await run_sweep(CODE.replace("y", "x"), space=space, trials=1, objective="loss", start=points)
    assert len(again.trials) == 1
    assert len(read_rows(points.to_dict("records"), space).known) == 3
    known = read_rows(str(tmp_path / "repeated.csv"), space).known
    assert [result.outputs["loss"] for result in known] == [point.loss for point in repeated.groups]


def test_rows_without_a_number_are_left_out_and_text_is_read() -> None:
    space = {"x": {"low": 0.0, "high": 1.0}}
    values: list[Any] = [True, "0.5", None, "", "abc", float("nan"), 3, "NaN"]
    rows = read_rows([{"x": 0.5, "loss": value, "other": 1} for value in values], space)
    assert [result.outputs["loss"] for result in rows.known] == [1.0, 0.5, 3.0]
    assert rows.describe() == [
        "start: 3 known results, which are not run", "start: 5 rows without a number for the objective are left out"
    ]  # fmt: skip
    spec = ReportSpec("trial", (Objective("loss"),), constraints=("size",))
    rows = read_rows([{"x": 0.5, "loss": 1}, {"x": 0.5, "loss": 1, "size": -2}], space, spec)
    assert ([result.outputs for result in rows.known], rows.left_out) == ([{"loss": 1.0, "size": -2.0}], 1)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ([{"x": 2, "loss": 1}], "point 1 is .* which is not in the space"),
        ([{"z": 0.5, "loss": 1}], "point 1 is .* which is not in the space"),
        ([{"x": 0.5, "size": 1}], "point 1 is .* which is not in the space"),
        ([], "has no rows"),
    ],
)
def test_a_wrong_row_is_refused(start: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_rows(start, {"x": {"low": 0.0, "high": 1.0}})


async def test_a_study_has_one_trial_for_a_point_with_its_states_and_times(tmp_path: Path) -> None:
    before = datetime.now()  # noqa: DTZ005 - as Optuna
    code = """
import time
time.sleep(0.1)
if x == 2 or (x == 1 and repeat == 0):
    raise ValueError
SUBMIT(ok=repeat > x)
"""
    await run_sweep(
        code, grid={"x": [0, 1, 2, 10**400]}, repeats=4, objective="ok", direction="maximize",
        results_path=tmp_path / "job", on_failure="return",
    )  # fmt: skip
    after = datetime.now()  # noqa: DTZ005 - as Optuna
    trials = load_report(str(tmp_path / "job")).study().trials
    assert [trial.params["x"] for trial in trials] == ["0", "1", "2", "1" + 400 * "0"]
    assert [(trial.state.name, trial.values) for trial in trials] == [
        ("COMPLETE", [0.75]), ("COMPLETE", [pytest.approx(2 / 3)]), ("FAIL", None), ("COMPLETE", [0.0])
    ]  # fmt: skip
    for trial in trials:
        assert before < trial.datetime_start < trial.datetime_complete < after
        assert trial.duration.total_seconds() >= 0.4, "from the first repeat to the last"


async def test_a_trial_that_reports_its_last_step_is_complete() -> None:
    code = "for step in range(3):\n    report(0.0 if step < 2 else x, step)\nSUBMIT(loss=x)"
    parameters: dict[str, Any] = {"objective": "loss", "sampler": "random", "trials": 10}
    report = await run_sweep(
        code,
        space={"x": {"low": 0.0, "high": 1.0}},
        pruner="median(n_startup_trials=1, n_warmup_steps=2)",
        **parameters,
    )
    assert not any(trial.meta.pruned for trial in report.trials)
    assert all(trial.meta.submitted for trial in report.trials)


@pytest.mark.parametrize(
    ("pruner", "message"),
    [
        ({"name": "median", "steps": 5}, "unexpected keyword argument 'steps'"),
        ({"steps": 5}, "`pruner` is 'None.steps=5.'"),
        ("median(steps=5)", "unexpected keyword argument 'steps'"),
        ("median(5)", "cannot be read"),
        ("asha(min_resource=open('x'))", "cannot be read"),
        ("asha(", "`pruner`"),
        ("patient(patience=-1)", "patience"),
    ],
)
async def test_wrong_settings_of_a_pruner_are_refused(pruner: str | dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await run_sweep(
            "SUBMIT(loss=x)", space={"x": {"low": 0.0, "high": 1.0}}, trials=2, objective="loss", pruner=pruner
        )


@pytest.mark.parametrize(
    "pruner",
    ["median(n_startup_trials=1, n_warmup_steps=3)", {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 3}],
)
async def test_settings_of_a_pruner_are_optunas(tmp_path: Path, pruner: str | dict[str, Any]) -> None:
    code = "for step in range(6):\n    report(-x, step)\nSUBMIT(loss=-x)"
    report = await run_sweep(
        code, space={"x": {"low": 0.0, "high": 1.0}}, trials=10, objective="loss", sampler="random",
        pruner=pruner, results_path=tmp_path / "job",
    )  # fmt: skip
    pruned = [trial.meta.reports[-1][0] for trial in report.trials if trial.meta.pruned]
    assert set(pruned) == {3}, "the warm-up ends at step 3"
    write_csv(open_run_ledger(str(tmp_path / "job")), tmp_path / "job.csv")
    with (tmp_path / "job.csv").open(encoding="utf-8-sig") as file:
        assert [row["pruned"] for row in csv.DictReader(file)].count("true") == len(pruned)
