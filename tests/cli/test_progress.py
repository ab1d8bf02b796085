"""The display of a run's progress."""

import pytest

from rlm_batch.cli.progress import ProgressDisplay
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.sandbox.queries.records import Query, RlmEvent
from rlm_batch.tasks.ledger.run_record import ReportSpec


def test_a_failed_turn_shows_its_last_line_after_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    output = "cloning\n10 %\r100 %\rfatal: no space left\n"
    with ProgressDisplay() as display:
        display.on_start(1, "here", "/results", RunSummary(ReportSpec()), "quick-fox")
        query = Query("rlm_query", 1, "model", "why?")
        display.on_rlm_event(0, RlmEvent(kind="output", query=query, turn=2, output=output, failed=True))
    assert "turn 2: failed: fatal: no space left (0.0 s)" in capfd.readouterr().err
