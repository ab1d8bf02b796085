"""The sweep flow."""

import math
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, load_report, sweep
from rlm_batch.flows.plan import label_execution
from rlm_batch.flows.reporting.export import write_csv
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.sandbox.outcomes.text_escape import escape_text
from rlm_batch.tasks.execution import Execution

pytestmark = pytest.mark.anyio

CODE = (
    "import random\n"
    "random.seed(42)\n"
    "loss = 1.0 / (lr * batch_size + 0.01) + random.random() * 0.1\n"
    "SUBMIT(lr=lr, batch_size=batch_size, loss=loss)"
)
GRID = {"lr": [0.001, 0.01], "batch_size": [32, 64]}
LOSSES = {(0.001, 32): 23.8735, (0.01, 32): 3.0942, (0.001, 64): 13.5775, (0.01, 64): 1.6024}


async def test_a_grid_returns_its_losses_and_the_best_trial():
    report = await sweep(CODE, GRID, objective="loss")
    losses = {(trial.lr, trial.batch_size): round(trial.loss, 4) for trial in report.trials}
    assert losses == pytest.approx(LOSSES, abs=1e-4)
    assert (report.best.lr, report.best.batch_size) == (0.01, 64)
    assert [trial.meta.variables for trial in report.trials][1] == {"lr": 0.001, "batch_size": 64}
    rows = [line.split() for line in str(report).splitlines()]
    assert rows[0] == ["lr", "batch_size", "loss"]
    assert [row[-1] == "best" for row in rows[1:]] == [False, False, False, True]


async def test_the_report_lists_failed_trials_and_the_best_trial():
    report = await sweep("SUBMIT(y=1 / x)", {"x": [0, 1, 2]}, objective="y", on_failure="return")
    assert report.best.y == 0.5
    assert "ZeroDivisionError" in str(report.trials[0].error)
    assert "division by zero" in str(report)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "pass one of `grid`, `points` or `space`"),
        ({"grid": {"x": []}}, r"`grid`\['x'\] is \[\]: "),
        ({"points": [{"x": 1, "y": 2}, {"x": 1}]}, "item 2 of points has no variable 'y'"),
        ({"points": "nosuch.csv"}, "No such file"),
    ],
)
async def test_an_invalid_space_is_refused_with_one_sentence(space, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        await sweep(CODE, **space)
    assert "\n" not in str(raised.value)


@pytest.mark.full
async def test_a_missing_objective_lists_the_submitted_fields():
    with pytest.raises(
        ConfigurationError, match="no trial submitted 'los', they submitted lr, batch_size, loss: name another"
    ):
        await sweep(CODE, GRID, objective="los")
    with pytest.raises(ConfigurationError, match="no trial submitted 'loss' as a number: call SUBMIT"):
        await sweep("pass", {"x": [1]}, objective="loss")
    for value in ("'0.5'", "(1, 2)"):
        with pytest.raises(ConfigurationError, match="no trial submitted 'loss' as a number: call SUBMIT"):
            await sweep(f"SUBMIT(loss={value})", {"x": [1]}, objective="loss")


@pytest.mark.parametrize(
    ("parameters", "best"),
    [
        ({"objective": "ok", "repeats": 2}, [2]),
        ({"objective": ["ok", "x"]}, [2, 3]),
        ({"objective": "x", "constraints": "ok"}, [3]),
        ({"grid": {}, "space": {"x": [1, 2, 3]}, "objective": "ok", "trials": 9, "stop_at": 1}, [2]),
    ],
)
async def test_a_bool_is_0_or_1(parameters: dict[str, Any], best: list[int], tmp_path: Path):
    parameters = {"grid": {"x": [1, 2, 3]}, **parameters, "results_path": tmp_path, "provider": "local:none"}
    await sweep("SUBMIT(ok=x == 2, x=x)", direction="maximize", **parameters)
    report = await sweep("SUBMIT(ok=x == 2, x=x)", direction="maximize", **parameters)  # resumed
    for read in (report, load_report(str(tmp_path))):
        assert [trial.meta.variables["x"] for trial in read.best_trials] == best
        assert all(trial.values for trial in read.study().trials)


async def test_a_diverged_trial_ranks_last_and_is_not_rerun(tmp_path):
    """A learning rate that is too large gives NaN, which is a useful result and not a failure."""
    code = "loss = {1: 2.5, 2: float('nan'), 3: float('inf'), 4: -float('inf'), 5: 7.5, 6: 10**400}[x]\n"
    code += "SUBMIT(loss=loss, curve=[1, loss])"
    grid = {"x": [2, 3, 4, 5, 1, 6]}
    report = await sweep(code, grid, objective="loss", direction="maximize", results_path=tmp_path)
    assert [str(trial.loss)[:9] for trial in report.trials] == ["nan", "inf", "-inf", "7.5", "2.5", "1" + "0" * 8]
    assert report.best.loss == 7.5
    again = await sweep(code, grid, objective="loss", results_path=tmp_path)
    assert [trial.meta.sandbox_id for trial in again.trials] == [trial.meta.sandbox_id for trial in report.trials]
    assert again.best.loss == 2.5
    assert [str(trial.curve) for trial in again.trials][:3] == ["[1, nan]", "[1, inf]", "[1, -inf]"]
    write_csv(open_run_ledger(report.results_path), tmp_path / "trials.csv")
    rows = (tmp_path / "trials.csv").read_text("utf-8-sig").splitlines()
    assert [row.split(",")[2][:9] for row in rows] == [
        "loss", "NaN", "Infinity", "-Infinity", "7.5", "2.5", "1" + "0" * 8
    ]  # fmt: skip
    none = await sweep("SUBMIT(loss=x * float('inf'))", {"x": [1, -1]}, objective="loss")
    assert (none.best.loss, none.best.meta.index) == (math.inf, 0)


async def test_a_grid_may_contain_infinity_and_nan(tmp_path):
    path = tmp_path / "run"
    values = [math.inf, math.nan, None]
    report = await sweep("SUBMIT(y=str(x), z=x)", {"x": values}, results_path=path)
    assert [trial.y for trial in report.trials] == ["inf", "nan", "None"]
    again = await sweep("SUBMIT(y=str(x), z=x)", {"x": values[::-1]}, results_path=path)
    assert [trial.y for trial in again.trials] == ["None", "nan", "inf"]
    assert {trial.meta.sandbox_id for trial in again.trials} == {trial.meta.sandbox_id for trial in report.trials}


async def test_a_printed_report_contains_no_terminal_command():
    evil = "\x1b]0;owned\x07\x9b2J\u202e\n"
    code = "if x:\n    raise ValueError(text)\nSUBMIT(**{text: text, 'y': [text]})"
    report = await sweep(code, points=[{"x": x, "text": evil} for x in (0, 1)], on_failure="return")
    shown = str(report)
    assert shown == escape_text(shown, keep="\n")
    assert len(shown.splitlines()) == 3
    assert report.trials[0].y == [evil]
    assert evil in report.trials[1].error.text


def test_names_of_task_runs_are_one_printable_line():
    evil = "\x1b]0;owned\x07\u202e\n"
    for noun, variables in (("trial", {"x": evil, evil: 1}), ("chunk", {"chunk_id": evil})):
        label = label_execution(noun, Execution(0, "", variables, ""))
        assert "owned" in label
        assert label == escape_text(label)
