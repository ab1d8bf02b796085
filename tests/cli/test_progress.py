"""The display of a run's progress."""

import pytest

from rlm_batch import Result
from rlm_batch.cli.progress import ProgressDisplay
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import ReportSpec


def test_each_execution_of_a_run_with_repeats_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        display.on_start(2, "here", "/results", ReportSpec().with_repeats(2, 1), "quick-fox")
        for repeat in (0, 1):
            display.on_outcome(Result({"loss": repeat}, Meta(index=repeat, group=0, repeat=repeat)), cached=False)
    assert "2 of 2 done" in capfd.readouterr().err
