"""Sweeps that search."""

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import RandomSampler

from rlm_batch import ConfigurationError, ExecutionsFailed, Result, batch, sweep
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_report, build_summary_rows
from rlm_batch.flows.search.plan import SearchPlan
from rlm_batch.flows.search.search import DrawnPoints
from rlm_batch.flows.search.space import parse_space
from rlm_batch.flows.search.study import derive_seed
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import AskedTrial, TrialReport
from rlm_batch.tasks.ledger.run_record import list_run_records

pytestmark = pytest.mark.anyio

SPACE = {"x": {"low": -5.0, "high": 10.0}, "opt": ["adam", "sgd"]}
CODE = "SUBMIT(loss=(x - 3) ** 2 + (opt == 'sgd'))"
TRAINING = "for step in range(9):\n    report(x + 1 / (step + 1), step)\nSUBMIT(loss=x + 1 / 9, steps=9)"
ONE = {"x": {"low": 0.0, "high": 1.0}}
OPTIONS: dict[str, Any] = {"provider": "local:none", "reuse_sandboxes": True}


async def run_sweep(*arguments: Any, **parameters: Any) -> Any:
    """Return the report of a sweep as Any, because its results have the fields that the code submits."""
    return await sweep(*arguments, **parameters)


def list_points(report: Any) -> list[dict[str, Any]]:
    return [trial.meta.variables for trial in report.trials]


async def test_with_one_worker_the_points_equal_optunas() -> None:
    space: dict[str, Any] = {
        "lr": {"low": 1e-5, "high": 0.1, "log": True},
        "units": {"low": 16, "high": 256, "step": 16},
        "depth": {"low": 1, "high": 64, "log": True},
        "share": {"low": 0.0, "high": 1.0, "step": 0.25},
        "opt": ["adam", "sgd", "rmsprop"],
    }
    distributions: dict[str, Any] = {
        "lr": optuna.distributions.FloatDistribution(1e-5, 0.1, log=True),
        "units": optuna.distributions.IntDistribution(16, 256, step=16),
        "depth": optuna.distributions.IntDistribution(1, 64, log=True),
        "share": optuna.distributions.FloatDistribution(0.0, 1.0, step=0.25),
        "opt": optuna.distributions.CategoricalDistribution(["adam", "sgd", "rmsprop"]),
    }
    code = "SUBMIT(loss=lr * 10 + abs(units - 128) / 100 + depth / 64 + share + (opt == 'sgd'))"
    report = await run_sweep(code, space=space, trials=15, seed=3, objective="loss", max_workers=1, **OPTIONS)
    study = optuna.create_study()
    for number in range(15):  # the first ten points are random
        study.sampler = optuna.samplers.TPESampler(seed=derive_seed(3, number))
        trial = study.ask(distributions)
        lr, units, depth, share, opt = trial.params.values()
        study.tell(trial, lr * 10 + abs(units - 128) / 100 + depth / 64 + share + (opt == "sgd"))
    assert list_points(report) == [trial.params for trial in study.trials]
    assert report.best.loss == study.best_value
    again = report.study()
    assert [(trial.params, trial.values) for trial in again.trials] == [(t.params, t.values) for t in study.trials]


@pytest.mark.full
async def test_random_points_depend_on_the_seed_and_not_on_the_workers() -> None:
    parameters: dict[str, Any] = {"space": SPACE, "trials": 8, "sampler": "random", **OPTIONS}
    first = await run_sweep(CODE, max_workers=1, **parameters)
    second = await run_sweep(CODE, max_workers=4, objective="loss", **parameters)
    other = await run_sweep(CODE, seed=1, **parameters)
    assert list_points(first) == list_points(second) != list_points(other)
    assert (first.best, second.best.loss) == (None, min(trial.loss for trial in second.trials))
    plan = SearchPlan(parse_space(SPACE), 8, (), "random")
    assert list(DrawnPoints(plan)) == list_points(first), "as shards are given them"


async def test_a_search_resumes_and_pruned_trials_keep_their_curves(
    tmp_path: Path,
) -> None:
    parameters: dict[str, Any] = {
        "space": ONE, "sampler": "random", "pruner": "asha", "objective": "loss", "max_workers": 1,
        "results_path": tmp_path / "job", **OPTIONS
    }  # fmt: skip
    first = await run_sweep(TRAINING, trials=5, **parameters)
    report = await run_sweep(TRAINING, trials=12, **parameters)
    assert list_points(report)[:5] == list_points(first)
    assert [trial.outputs for trial in report.trials[:5]] == [trial.outputs for trial in first.trials]
    pruned = [trial for trial in report.trials if trial.meta.pruned]
    whole = [trial for trial in report.trials if not trial.meta.pruned]
    assert pruned
    assert whole
    assert all(isinstance(trial, Result) for trial in report.trials)
    for trial in pruned:
        x, steps = trial.meta.variables["x"], len(trial.meta.reports)
        assert trial.meta.reports == tuple((step, x + 1 / (step + 1)) for step in range(steps))
        assert steps in (2, 5)
        assert trial.outputs == {"loss": trial.meta.reports[-1][1]}
        assert not trial.meta.submitted
        with pytest.raises(AttributeError, match="the code was pruned before SUBMIT"):
            _ = trial.steps
    assert all(len(trial.meta.reports) == 9 for trial in whole)
    assert report.best.loss == min(trial.loss for trial in whole)
    assert str(report).count(" pruned") == len(pruned)
    read = list(open_run_ledger(report.results_path).read_outcomes())
    assert [(outcome.meta.reports, outcome.meta.pruned) for outcome in read] == [
        (trial.meta.reports, trial.meta.pruned) for trial in report.trials
    ]
    states = {trial.state.name for trial in report.study().trials}
    assert states == {"COMPLETE", "PRUNED"}


@pytest.mark.full
async def test_a_failed_trial_is_rerun_with_the_same_point(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    marks = str(tmp_path / "marks")
    code = f"""
import pathlib
mark = pathlib.Path({marks!r}, str(x))
if not mark.exists():
    mark.touch()
    1 / 0
SUBMIT(loss=x)
"""
    parameters: dict[str, Any] = {
        "space": ONE, "trials": 4, "objective": "loss", "results_path": tmp_path / "job", **OPTIONS
    }  # fmt: skip
    with pytest.raises(ExecutionsFailed, match="4 of 4 trials failed") as failed:
        await run_sweep(code, **parameters)
    report = await run_sweep(code, **parameters)
    assert list_points(report) == [failure.meta.variables for failure in failed.value.results]


@pytest.mark.full
async def test_changed_code_or_space_starts_a_new_search_on_the_ledger(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"trials": 3, "objective": "loss", "results_path": tmp_path / "job", **OPTIONS}
    await run_sweep("SUBMIT(loss=x)", space=ONE, **parameters)
    other = await run_sweep("SUBMIT(loss=-x)", space=ONE, **parameters)
    wide = await run_sweep("SUBMIT(loss=-x)", space={"x": {"low": 5.0, "high": 6.0}}, **parameters)
    assert [trial.loss for trial in other.trials] == [-point["x"] for point in list_points(other)]
    assert all(point["x"] >= 5 for point in list_points(wide))


@pytest.mark.full
async def test_a_cached_result_is_reused_unless_the_trial_was_pruned(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'count')!r}, 'a').write('.')\n" + TRAINING
    parameters: dict[str, Any] = {
        "space": ONE, "trials": 12, "sampler": "random", "objective": "loss", "max_workers": 1, **OPTIONS
    }  # fmt: skip
    first = await run_sweep(code, pruner="asha", **parameters)
    again = await run_sweep(code, pruner="asha", cache_results=True, **parameters)
    pruned = sum(trial.meta.pruned for trial in first.trials)
    assert 0 < pruned == sum(trial.meta.pruned for trial in again.trials)
    assert len((tmp_path / "count").read_text()) == 12 + pruned
    points = [{"x": point["x"]} for point in list_points(first)]
    results = await batch(code, inputs=points, cache_results=True, **OPTIONS)
    assert [len(result.meta.reports) for result in results] == [9] * 12, "a batch has no pruned results"


async def test_several_objectives_give_a_front_instead_of_a_best_trial() -> None:
    code = "SUBMIT(error=1 / units, seconds=units if opt == 'a' else 2 * units)"
    space = {"units": {"low": 1, "high": 50}, "opt": ["a", "b"]}
    report = await run_sweep(
        code, space=space, trials=15, objective=["error", "seconds"], direction=["minimize", "minimize"], **OPTIONS
    )
    assert report.best is None
    scores = {trial.meta.index: (trial.error, trial.seconds) for trial in report.trials}
    front = {
        number
        for number, (error, seconds) in scores.items()
        if not any(e <= error and s <= seconds and (e, s) != (error, seconds) for e, s in scores.values())
    }
    assert {trial.meta.index for trial in report.pareto_front} == front
    assert str(report).count("Pareto") == len(front)
    assert {trial.number for trial in report.study().best_trials} == front


@pytest.mark.full
async def test_a_study_is_saved_to_storage_for_optunas_tools(tmp_path: Path) -> None:
    report = await run_sweep(CODE, space=SPACE, trials=5, objective="loss", **OPTIONS)
    url = f"sqlite:///{tmp_path}/study.db"
    report.study(url, "first")
    loaded = optuna.load_study(study_name="first", storage=url)
    assert loaded.best_value == report.best.loss
    with pytest.raises(ConfigurationError, match="the study cannot be created in"):
        report.study(url, "first")
    grid = await run_sweep("SUBMIT(loss=x)", {"x": [1, 2, 3]}, objective="loss", **OPTIONS)
    assert grid.study().best_params == {"x": 1}


@pytest.mark.full
async def test_trials_after_the_deadline_have_no_point(tmp_path: Path) -> None:
    report = await run_sweep(
        "import time\ntime.sleep(1000)", space=ONE, trials=40, objective="loss", deadline=10, max_workers=2,
        on_failure="return", results_path=tmp_path / "job", **OPTIONS,
    )  # fmt: skip
    asked = [line for line in Ledger(tmp_path / "job").read_search_lines() if isinstance(line, AskedTrial)]
    assert len(asked) < 40
    assert [bool(point) for point in list_points(report)] == [True] * len(asked) + [False] * (40 - len(asked))


async def test_a_second_run_on_the_ledger_of_a_search_is_refused(tmp_path: Path) -> None:
    other = Ledger(tmp_path / "job")
    other.create()
    assert other.register_writer()
    with pytest.raises(ConfigurationError, match="a search needs its ledger alone"):
        await run_sweep(CODE, space=SPACE, trials=2, objective="loss", results_path=tmp_path / "job", **OPTIONS)
    other.unregister_writer()


async def test_a_trial_rerun_after_a_lost_sandbox_keeps_its_first_reports(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
mark = pathlib.Path({str(tmp_path / "mark")!r})
is_first = not mark.exists()
mark.touch()
for step in range(3):
    report(x + (0 if is_first else 9), step)
if is_first:
    os.kill(os.getppid(), 9)
    time.sleep(1000)
report(x, 3)
SUBMIT(loss=x)
"""
    report = await run_sweep(
        code, space=ONE, trials=1, pruner="median", objective="loss", idempotent=True, results_path=tmp_path / "job",
        provider="local:none",
    )  # fmt: skip
    (trial,) = report.trials
    assert trial.meta.attempt == 2
    lines = [line for line in Ledger(tmp_path / "job").read_search_lines() if isinstance(line, TrialReport)]
    assert [(line.step, line.value) for line in lines] == [(step, trial.loss) for step in range(4)]


async def test_start_points_are_tried_first_also_when_a_search_goes_on(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"space": SPACE, "objective": "loss", "results_path": tmp_path / "job", **OPTIONS}
    first = await run_sweep(CODE, trials=3, start=[{"x": 3.5, "opt": "sgd"}, {"x": -1}], max_workers=1, **parameters)
    assert list_points(first)[0] == {"x": 3.5, "opt": "sgd"}
    assert list_points(first)[1]["x"] == -1
    again = await run_sweep(CODE, trials=5, start=[{"x": -1}, {"x": 3.0}], max_workers=1, **parameters)
    assert list_points(again)[:3] == list_points(first)
    assert list_points(again)[3]["x"] == 3.0


@pytest.mark.parametrize(
    ("stop", "count", "reason"),
    [
        ({"stop_at": 0.5}, 3, "after 3 of at most 6 trials, because loss reached 0.25, and stop_at is 0.5"),
        ({"stop_after": 2}, 5, "after 5 of at most 6 trials, because 2 trials in a row brought no improvement"),
        ({"stop_at": -1.0}, 6, ""),
    ],
)
async def test_a_search_stops_at_a_target_or_without_improvement_and_resumes(
    stop: dict[str, Any], count: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = [{"x": x, "opt": "adam"} for x in (5.0, 4.0, 3.5, 9.0, 9.5, 10.0)]
    parameters: dict[str, Any] = {
        "space": SPACE, "objective": "loss", "start": start, "trials": 6, "max_workers": 1,
        "results_path": tmp_path / "job", **OPTIONS,
    }  # fmt: skip
    report = await run_sweep(CODE, **stop, **parameters)
    assert (len(report.trials), report.best.loss) == (count, 0.25)
    assert len((await run_sweep(CODE, **stop, **parameters)).trials) == count
    assert len(list(Ledger(tmp_path / "job").read_lines())) == count, "and nothing ran"
    said = [text for text in caplog.messages if "the search had stopped after" in text]
    assert len(said) == (1 if count < 6 else 0)
    (_, *rows) = build_summary_rows(
        open_run_ledger(report.results_path).summarize(), list_run_records(tmp_path / "job")
    )
    assert [row[1] for row in rows if row[0] == "Stopped"] == [reason] * (count < 6)
    assert all(text.endswith("set another `stop_at` or `stop_after` to continue it") for text in said)
    assert len((await run_sweep(CODE, stop_after=100, **parameters)).trials) == 6
    assert len((await run_sweep(CODE, stop_after=100, **{**parameters, "trials": 7})).trials) == 7


async def test_a_resumed_search_has_the_settings_of_its_ledger(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sampler": "random", "seed": 7, "stop_at": -0.5, "pruner": "patient:3"}
    parameters: dict[str, Any] = {"space": ONE, "objective": "loss", "results_path": tmp_path / "job", **OPTIONS}
    code = "report(x, 0)\nSUBMIT(loss=x)"
    first = await run_sweep(code, trials=3, max_workers=1, **settings, **parameters)
    resumed = await run_sweep(code, trials=6, stop_at=-1, **parameters)
    settings["stop_at"] = -1.0
    whole = await run_sweep(code, trials=6, **settings, **{**parameters, "results_path": tmp_path / "whole"})
    assert list_points(resumed) == list_points(whole)
    assert [trial.meta.sandbox_id for trial in resumed.trials[:3]] == [trial.meta.sandbox_id for trial in first.trials]
    assert list_run_records(tmp_path / "job")[-1].search == list_run_records(tmp_path / "whole")[-1].search


class MySampler(RandomSampler):
    """A sampler of a module of the user's."""


async def test_a_resumed_search_imports_no_module_that_only_its_ledger_names(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"space": ONE, "objective": "loss", "results_path": tmp_path / "job", **OPTIONS}
    await run_sweep("SUBMIT(loss=x)", trials=1, sampler=f"{__name__}:MySampler", **parameters)
    with pytest.raises(ConfigurationError, match="MySampler: name it with `sampler`"):
        await run_sweep("SUBMIT(loss=x)", trials=2, **parameters)
    report = await run_sweep("SUBMIT(loss=x)", trials=2, sampler="random", **parameters)
    assert len(report.trials) == 2


@pytest.mark.parametrize("pruner", ["hyperband", "patient:2"])
async def test_hyperband_and_patience_prune_trials(pruner: str) -> None:
    code = "for step in range(9):\n    report(x + (step if x > 0.3 else -step) / 9, step)\nSUBMIT(loss=x)"
    report = await run_sweep(
        code, space=ONE, trials=12, sampler="random", pruner=pruner, objective="loss", max_workers=1, **OPTIONS
    )
    assert any(trial.meta.pruned for trial in report.trials)
    assert any(not trial.meta.pruned for trial in report.trials)
    if pruner == "patient:2":
        assert all(trial.meta.pruned == (trial.meta.variables["x"] > 0.3) for trial in report.trials)


async def test_only_a_feasible_trial_is_the_best_and_the_sampler_learns_the_constraints(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"space": ONE, "objective": "loss", "constraints": ["size", "other"], "max_workers": 1}
    parameters |= {"results_path": tmp_path / "job", "trials": 15, **OPTIONS}
    report = await run_sweep("SUBMIT(loss=x, size=0.5 - x, other=-1)", **parameters)
    feasible = [trial for trial in report.trials if trial.size <= 0]
    assert report.best.loss == min(trial.loss for trial in feasible) > min(trial.loss for trial in report.trials)
    assert report.study().best_value == report.best.loss
    study, kind = optuna.create_study(), optuna.distributions.FloatDistribution(0.0, 1.0)
    for number in range(15):
        study.sampler = optuna.samplers.TPESampler(seed=derive_seed(0, number), constant_liar=True)
        trial = study.ask({"x": kind})
        trial.set_constraint("size", 0.5 - trial.params["x"])
        trial.set_constraint("other", -1)
        study.tell(trial, trial.params["x"])
    assert list_points(report) == [trial.params for trial in study.trials]
    count = 15 - len(feasible)
    assert str(report).count(" infeasible") == count
    summary = open_run_ledger(report.results_path).summarize()
    assert summary.best.result is not None
    assert (summary.best.result.meta.index, summary.infeasible) == (report.best.meta.index, count)
    (record,) = list_run_records(tmp_path / "job")
    content = build_report(summary, [record])
    assert ["Infeasible", f"{count} trials, with size or other above 0"] in content.figures
    assert "a ring is an infeasible trial" in content.charts[0][1]


@pytest.mark.parametrize(("objective", "row"), [("loss", "Best loss"), (["loss", "size"], "Pareto front")])
async def test_without_a_feasible_trial_there_is_no_best_and_the_report_says_so(
    objective: str | list[str], row: str, tmp_path: Path
) -> None:
    code, constraints = "SUBMIT(loss=x, size=1)", "size"
    report = await run_sweep(
        code, {"x": [1, 2]}, objective=objective, constraints=constraints, results_path=tmp_path, **OPTIONS
    )
    assert report.best is None
    assert report.list_notes() == ["no trial is feasible, so none is the best: each has size above 0"]
    assert report.summary() == "2 of 2 trials succeeded; no trial is feasible"
    summary = open_run_ledger(str(tmp_path)).summarize()
    assert [row, "none: no trial is feasible"] in build_summary_rows(summary, list_run_records(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"objective": "los"}, "no trial submitted 'los', they submitted loss, size, ok: name another field"),
        (
            {"objective": "loss", "constraints": "sise"},
            "no trial submitted 'sise', they submitted loss, size, ok: name another field",
        ),
        (
            {"objective": "loss", "constraints": "ok"},
            "the constraint ok is no number",
        ),
    ],
)
async def test_a_misspelt_field_ends_the_run_at_the_first_success(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    code = "SUBMIT(loss=x, size=1, ok='yes')"
    parameters: dict[str, Any] = {"space": ONE, "trials": 50, "max_workers": 1, "results_path": tmp_path, **OPTIONS}
    for _ in range(2):  # The second run finds the first success in the ledger.
        with pytest.raises(ConfigurationError, match=message):
            await run_sweep(code, **parameters, **wrong)
        assert len(list(Ledger(tmp_path).read_lines())) == 1


async def test_an_empty_text_is_no_constraint() -> None:
    report = await run_sweep("SUBMIT(loss=x)", {"x": [2, 1]}, objective="loss", constraints="", **OPTIONS)
    assert report.best.meta.variables == {"x": 1}


async def test_an_objective_may_be_a_statistic_of_repeats() -> None:
    code = "SUBMIT(loss=repeat * x)"
    report = await run_sweep(code, {"x": [2, 1]}, objective="loss.std", constraints="loss.max", repeats=2, **OPTIONS)
    assert report.best is None
    report = await run_sweep(code, {"x": [2, 1]}, objective="loss.std", constraints="loss.min", repeats=2, **OPTIONS)
    assert report.best.meta.variables == {"x": 1}
