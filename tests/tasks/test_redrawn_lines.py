"""Redrawn lines of output, as from progress bars: the log and the results have their last version."""

import logging

import pytest

from rlm_batch import Result
from rlm_batch.cli.progress import ProgressDisplay
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.flows.reports import report_outcomes
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import ReportSpec
from rlm_batch.tasks.redrawn_lines import redraw_lines
from rlm_batch.tasks.task_log import LineBudget, OutputLog

BAR = "".join(
    f"\r{percent:3}%|{'#' * percent:100}| {percent}/100 [00:{percent % 60:02}<00:00]" for percent in range(101)
)


@pytest.mark.parametrize(
    ("output", "last"),
    [
        (BAR, ["100%"]),
        (BAR + "\n", ["100%"]),
        ("\r".join(f"{number}%" for number in range(101)) + "\r\n", ["100%"]),
        ("one\r\ntwo\x1b[31m red\r\n", ["one", "two\\x1b[31m red"]),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_the_log_and_the_terminal_show_the_last_state(
    output: str, last: list[str], size: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    display = ProgressDisplay()
    display.on_start(1, "here", "/results", RunSummary(ReportSpec()), "quick-fox")
    with caplog.at_level(logging.INFO, "test_redrawn"):
        log = OutputLog(LineBudget(), logger=logging.getLogger("test_redrawn"))
        for start in range(0, len(output), size):
            log.write("stdout", output[start : start + size])
            display.on_output(0, "stdout", output[start : start + size])
        log.close()
    result = Result({}, Meta(index=0, stdout=output))
    display.on_outcome(result, cached=False)
    logged = [record.getMessage() for record in caplog.records if record.name == "test_redrawn"]
    printed = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    for lines in (logged, printed, redraw_lines(output)):
        assert len(lines) < 10
        shown = [line.replace("\x1b", "\\x1b") for line in lines[-len(last) :]]
        assert all(line.startswith(begin) for line, begin in zip(shown, last, strict=True)), lines
    assert report_outcomes([result], "/results", ReportSpec()).rows(shows_output=True)[1][-2].strip()
