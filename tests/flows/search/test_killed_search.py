"""A killed search: it resumes with its previous trials, whenever its process was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from rlm_batch import reap, sweep
from rlm_batch.blocks.local import inventory
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import AskedTrial, LedgerLine, TrialReport

from ...infra.waiting import wait_until

pytestmark = pytest.mark.anyio

SPACE: Any = {"x": {"low": 0.0, "high": 1.0}, "opt": ["a", "b"]}
# Code that counts its reports in a file, and waits forever once the count reaches the test's limit.
CODE = """
import os, time
for step in range(5):
    report(abs(x - 0.3) + (opt == "b") + 1 / (step + 1), step)
    with open(f"{folder}/reports", "a") as file:
        file.write(".")
    with open(f"{folder}/allowed") as file:
        allowed = int(file.read())
    while os.path.getsize(f"{folder}/reports") >= allowed:
        time.sleep(1000)
SUBMIT(loss=abs(x - 0.3) + (opt == "b"))
"""
OPTIONS: dict[str, Any] = {
    "space": SPACE, "sampler": "tpe", "pruner": "median", "objective": "loss", "max_workers": 3,
    "provider": "local:none", "reuse_sandboxes": True, "timeout": 1000,
}  # fmt: skip
PROGRAM = f"""
import asyncio, sys
from rlm_batch import sweep
asyncio.run(sweep(sys.argv[3], trials=int(sys.argv[2]), results_path=sys.argv[1], **{OPTIONS!r}))
"""


def kill_once_it_has_reported(job: Path, trials: int, code: str) -> None:
    """Run the search in a process, and kill it once its trials have made the allowed number of reports."""
    allowed = int((job.parent / "allowed").read_text())
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(job), str(trials), code], start_new_session=True)
    try:
        wait_until(lambda: (job.parent / "reports").stat().st_size >= allowed)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tell_plainly(job: Path) -> Any:
    """Return a study that is filled from the same ledger through Optuna's public API."""
    kinds, states = optuna.distributions, optuna.trial.TrialState
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
    distributions: Any = {"x": kinds.FloatDistribution(0.0, 1.0), "opt": kinds.CategoricalDistribution(["a", "b"])}
    trials: dict[str, Any] = {}
    reports: dict[str, dict[int, float]] = {}
    for line in Ledger(job).read_search_lines():
        if isinstance(line, AskedTrial):
            trials[line.key] = line
        elif isinstance(line, TrialReport):
            reports.setdefault(line.key, {}).setdefault(line.step, line.value)
    ended = {
        line.key: line for line in Ledger(job).read_search_lines() if isinstance(line, LedgerLine) and line.is_success
    }
    for key, trial in sorted(trials.items(), key=lambda item: item[1].index):
        is_pruned = ended[key].data["meta"].get("pruned", False)
        steps = reports.get(key, {})
        study.add_trial(
            optuna.create_trial(
                state=states.PRUNED if is_pruned else states.COMPLETE,
                value=steps[max(steps)] if is_pruned else ended[key].data["outputs"]["loss"],
                params=trial.variables,
                distributions=distributions,
                intermediate_values=steps,
            )
        )
    return study


@pytest.mark.full
async def test_a_search_killed_at_any_moment_resumes_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, code, trials = tmp_path / "job", f"folder = {str(tmp_path)!r}\n{CODE}", 20
    (tmp_path / "reports").touch()
    points: dict[int, dict[str, Any]] = {}
    for allowed in (1, 6, 14, 22):  # the first five trials make 25 reports, as none of them is pruned
        (tmp_path / "allowed").write_text(str(allowed))
        kill_once_it_has_reported(job, trials, code)
        for line in Ledger(job).read_search_lines():
            if isinstance(line, AskedTrial):
                assert points.setdefault(line.index, line.variables) == line.variables, "a point has changed"
    (tmp_path / "allowed").write_text("1000")
    report = await sweep(code, trials=trials, results_path=job, **OPTIONS)
    assert len(report.trials) == trials
    assert all(report.trials[number].meta.variables == point for number, point in points.items())
    lines = list(Ledger(job).read_search_lines())
    asked = [line.index for line in lines if isinstance(line, AskedTrial)]
    assert asked == list(range(trials)), "every trial is asked for once"
    ended = [line.data["index"] for line in lines if isinstance(line, LedgerLine)]
    assert sorted(ended) == list(range(trials)), "every trial has one result"
    plain_study = tell_plainly(job)
    assert [(t.state, t.params, t.values) for t in report.study().trials] == [
        (t.state, t.params, t.values) for t in plain_study.trials
    ]
    # A process that was killed before it wrote a folder's labels left a folder without labels. No live process will
    # add them.
    monkeypatch.setattr(inventory, "CREATION_GRACE_SECONDS", 0.0)
    await reap()  # remove the sandboxes of the killed processes
