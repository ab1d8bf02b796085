"""The display of a run's progress."""

import pytest

from rlm_batch.cli.progress import ProgressDisplay
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.queries.records import Query, RlmEvent
from rlm_batch.sandbox.result import Result
from rlm_batch.tasks.ledger.run_record import ReportSpec


def test_a_failed_turn_shows_its_last_line_after_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    output = "cloning\n10 %\r100 %\rfatal: no space left\n"
    with ProgressDisplay() as display:
        display.on_start(1, "here", "/results", RunSummary(ReportSpec()), "quick-fox")
        query = Query("rlm_query", 1, "model", "why?")
        display.on_rlm_event(0, RlmEvent(kind="output", query=query, turn=2, output=output, failed=True))
    assert "turn 2: failed: fatal: no space left (0.0 s)" in capfd.readouterr().err


def test_the_estimate_leaves_out_the_installation_and_earlier_results(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("rlm_batch.cli.progress.time.monotonic", lambda: now)
    summary = RunSummary(ReportSpec())
    with ProgressDisplay() as display:
        display.on_start(100, "here", "/results", summary, "quick-fox")
        for index in range(14):
            if index == 10:
                now += 300  # the installation, and four executions of two seconds side by side
            outcome = Result({}, Meta(index, seconds=2.0))
            summary.add(outcome)
            display.on_outcome(outcome, cached=index < 10)
        display.on_execution_start(14)
    lines = capfd.readouterr().err.splitlines()
    assert "14 of 100 done, 0 failed, 1 running, about 43 s left" in lines
