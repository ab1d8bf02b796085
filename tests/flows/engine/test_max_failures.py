"""The `max_failures` parameter: a run with too many failures ends early and warns at once."""

from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, ExecutionsFailed, Failure, NotRun, Result, batch, chunks, sweep
from rlm_batch.flows.listener import FlowListener
from rlm_batch.sandbox.result import Outcome

from ...infra.listening import run_with_listener

pytestmark = pytest.mark.anyio

ODD_FAILS = "if x % 2: raise KeyError(x)\nSUBMIT(x=x)"


def inputs(count: int) -> list[dict[str, int]]:
    return [{"x": x} for x in range(count)]


@pytest.mark.parametrize(("max_failures", "per_task"), [(0.15, 1), pytest.param(3, 50, marks=pytest.mark.full)])
async def test_no_execution_starts_after_max_failures_and_the_next_run_resumes(
    max_failures: float, per_task: int
) -> None:
    with pytest.raises(ExecutionsFailed, match=r"3 of 20 executions failed and 14 did not run") as caught:
        await batch(ODD_FAILS, inputs(20), max_failures=max_failures, max_workers=1, executions_per_task=per_task)
    results = caught.value.results
    assert [outcome.x for outcome in results[:6:2]] == [0, 2, 4]
    assert all(isinstance(outcome.error, CodeError) for outcome in results[1:6:2])
    for outcome in results[6:]:
        assert isinstance(outcome.error, NotRun)
        assert f"3 of 20 executions failed, and `max_failures` is {max_failures}" in str(outcome.error)
        assert "run it again with the same `results_path`" in str(outcome.error)
    again = await batch(ODD_FAILS, inputs(20), results_path=caught.value.results_path, on_failure="return")
    assert [outcome.x for outcome in again[::2]] == list(range(0, 20, 2))
    assert [type(outcome.error) for outcome in again[1::2]] == [CodeError] * 10


async def test_running_executions_finish_after_max_failures(tmp_path: Path) -> None:
    """The first execution fails once two others have started. The others end after the run has seen the failure."""
    code = f"""
import os, time

os.chdir({str(tmp_path)!r})
open(f"begun-{{x}}", "w").close()
while not (all(map(os.path.exists, ("begun-1", "begun-2"))) if x == 0 else os.path.exists("failed")):
    time.sleep(0.02)
if x == 0: raise ValueError
SUBMIT(x=x)
"""

    class Listener(FlowListener):
        def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
            (tmp_path / "failed").touch()

    parameters: dict[str, Any] = {"provider": "local:none", "max_failures": 1, "max_workers": 3, "on_failure": "return"}
    outcomes = await run_with_listener(batch, Listener(), code, inputs(9), **parameters)
    assert [type(outcome) for outcome in outcomes[:3]] == [Failure, Result, Result]
    assert [type(outcome.error) for outcome in outcomes[3:]] == [NotRun] * 6


@pytest.mark.full
async def test_a_sweep_and_a_chunked_job_stop_at_max_failures(volumes) -> None:
    report = await sweep(
        "if lr > 1: raise ValueError('diverged')\nSUBMIT(loss=lr)",
        grid={"lr": [1, 2, 3, 4]},
        objective="loss",
        max_failures=1,
        max_workers=1,
        on_failure="return",
    )
    assert report.best.loss == 1
    assert [type(trial.error) for trial in report.trials[1:]] == [CodeError, NotRun, NotRun]
    done = await chunks(
        "if data == 2: raise ValueError\nSUBMIT(twice=2 * data)",
        chunks={"a": 1, "b": 2, "c": 3},
        reduce="SUBMIT(total=0)",
        volume_name="early",
        max_failures=0.1,
        max_workers=1,
        on_failure="return",
    )
    assert done["a"].twice == 2
    assert isinstance(done["c"].error, NotRun)
    assert "2 of 3 executions have no result" in str(done.reduction.error)


async def test_executions_that_did_not_run_are_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ExecutionsFailed):
        await batch("raise KeyError(x)", inputs(30), max_failures=2, max_workers=1)
    lines = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    reason = (
        "not run: 2 of 30 executions failed, and `max_failures` is 2; run it again with the same `results_path`, or "
        "set a higher `max_failures`"
    )
    assert [line for line in lines if "NotRun" in line] == [
        f"execution 2 failed: NotRun: {reason}; the log shows no more failures with NotRun"
    ]
    assert lines[-1].startswith("ExecutionsFailed: 2 of 30 executions failed and 28 did not run")


@pytest.mark.full
async def test_earlier_results_are_returned_although_the_run_ends_early(results) -> None:
    with pytest.raises(ExecutionsFailed):
        await batch(ODD_FAILS, inputs(8), results_path=str(results / "job"))
    outcomes = await batch(
        ODD_FAILS, inputs(8), results_path=str(results / "job"), max_failures=1, max_workers=1, on_failure="return"
    )
    assert [outcome.x for outcome in outcomes[::2]] == [0, 2, 4, 6]
    assert [type(outcome.error) for outcome in outcomes[1::2]] == [CodeError, NotRun, NotRun, NotRun]
