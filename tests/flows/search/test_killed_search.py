"""A search whose process is killed at any moment goes on with the trials that it had."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from rlm_batch import reap, sweep
from rlm_batch.blocks.local import inventory
from rlm_batch.flows.search.plan import SearchPlan, parse_objectives
from rlm_batch.flows.search.search import Search
from rlm_batch.flows.search.space import parse_space
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import LedgerLine
from rlm_batch.tasks.ledger.trial_lines import AskedTrial, TrialReport

pytestmark = pytest.mark.anyio

SPACE: Any = {"x": {"low": 0.0, "high": 1.0}, "opt": ["a", "b"]}
CODE = """
import time
for step in range(5):
    time.sleep(0.02)
    report(abs(x - 0.3) + (opt == "b") + 1 / (step + 1), step)
SUBMIT(loss=abs(x - 0.3) + (opt == "b"))
"""
OPTIONS: dict[str, Any] = {
    "space": SPACE, "sampler": "tpe", "pruner": "median", "objective": "loss", "max_workers": 3,
    "provider": "local:none", "reuse_sandboxes": True,
}  # fmt: skip
PROGRAM = f"""
import asyncio, sys
from rlm_batch import sweep
asyncio.run(sweep({CODE!r}, trials=int(sys.argv[2]), results_path=sys.argv[1], **{OPTIONS!r}))
"""


def count_bytes(job: Path) -> int:
    return sum(part.stat().st_size for part in job.glob("part-*.jsonl"))


def kill_soon_after_it_writes(job: Path, trials: int, delay: float) -> bool:
    """Runs the search in a process and kills that so many seconds after it has written; whether it was not over."""
    before, until = count_bytes(job), time.monotonic() + 90
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(job), str(trials)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while process.poll() is None and count_bytes(job) == before and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(delay)
        return process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tell_plainly(job: Path) -> Any:
    """What Optuna's own study has that is told the same ledger, by its public face."""
    kinds, states = optuna.distributions, optuna.trial.TrialState
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
    distributions: Any = {"x": kinds.FloatDistribution(0.0, 1.0), "opt": kinds.CategoricalDistribution(["a", "b"])}
    trials: dict[str, Any] = {}
    reports: dict[str, dict[int, float]] = {}
    for line in Ledger(job).read_trial_lines():
        if isinstance(line, AskedTrial):
            trials[line.key] = line
        elif isinstance(line, TrialReport):
            reports.setdefault(line.key, {}).setdefault(line.step, line.value)
    ended = {
        line.key: line for line in Ledger(job).read_trial_lines() if isinstance(line, LedgerLine) and line.is_success
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


def describe(study: Any) -> list[Any]:
    return [(t.number, t.state, t.params, t.values, t.intermediate_values) for t in study.trials]


@pytest.mark.timeout(400)
@pytest.mark.full
@pytest.mark.parametrize(("kills", "trials"), [(1, 16), (10, 120)])
async def test_killed_at_any_moment_it_goes_on_with_the_trials_that_it_had(
    kills: int, trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, draw = tmp_path / "job", random.Random(7)
    points: dict[int, dict[str, Any]] = {}
    for _ in range(kills):
        assert kill_soon_after_it_writes(job, trials, draw.uniform(0, 0.4)), "it was over before it could be killed"
        for line in Ledger(job).read_trial_lines():
            if isinstance(line, AskedTrial):
                assert points.setdefault(line.index, line.variables) == line.variables, "a point has changed"
    searches: list[Search] = []
    load_history = Search.load_history
    monkeypatch.setattr(Search, "load_history", lambda search: (searches.append(search), load_history(search))[1])
    report = await sweep(CODE, trials=trials, results_path=job, **OPTIONS)
    assert len(report.trials) == trials
    assert all(report.trials[number].meta.variables == point for number, point in points.items())
    lines = list(Ledger(job).read_trial_lines())
    asked = [line.index for line in lines if isinstance(line, AskedTrial)]
    assert asked == list(range(trials)), "every trial is asked for once"
    ended = [line.data["index"] for line in lines if isinstance(line, LedgerLine)]
    assert sorted(ended) == list(range(trials)), "every trial has one result"
    told = describe(tell_plainly(job))
    assert describe(searches[0].study.study) == told
    assert [(t.state, t.params, t.values) for t in report.study().trials] == [(s, p, v) for _, s, p, v, _ in told]
    plan = SearchPlan(parse_space(SPACE), trials, parse_objectives("loss", "minimize"), pruner="median")
    again = Search(plan, CODE, searches[0].fingerprint, "local", Ledger(job), searches[0].cache)
    again.load_history()
    assert describe(again.study.study) == told
    # One that was killed between a folder and its labels has left it without: no live host can be about to write them.
    monkeypatch.setattr(inventory, "CREATION_GRACE_SECONDS", 0.0)
    await reap()  # what the killed ones have left
