"""Redrawn lines of output, as from progress bars: the log and the results have their last version."""

import io
import logging

import pytest
from rich.console import Console
from rich.progress import Progress

from rlm_batch import Result
from rlm_batch.cli.progress import ProgressDisplay
from rlm_batch.flows.reporting.table import format_rows
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import ReportSpec
from rlm_batch.tasks.redrawn_lines import redraw_lines
from rlm_batch.tasks.task_log import LineBudget, OutputLog

BAR = "".join(
    f"\r{percent:3}%|{'#' * percent:100}| {percent}/100 [00:{percent % 60:02}<00:00]" for percent in range(101)
)


def draw_with_rich() -> str:
    """Return the output of two rich progress bars on a terminal."""
    file = io.StringIO()
    with Progress(console=Console(file=file, force_terminal=True, width=80, color_system=None)) as progress:
        for name in ("first", "second"):
            progress.add_task(name, total=300)
        for _ in range(300):
            for task in progress.task_ids:
                progress.update(task, advance=1)
            progress.refresh()
    return file.getvalue()


@pytest.mark.parametrize(
    ("output", "last"),
    [
        (BAR, ["100%"]),
        (BAR + "\n", ["100%"]),
        (BAR.replace("\r", "\n\r\x1b[A\x1b[2K"), ["100%"]),
        ("\r".join(f"{number}%" for number in range(101)) + "\r\n", ["100%"]),
        ("50%" + "".join(f"\b\b\b{number}%" for number in range(51, 100)), ["99%"]),
        ("".join(f"\x1b[1G\x1b[K{number}%" for number in range(1000)), ["999%"]),
        ("".join(f"a{number}\nb{number}\x1b[1A\r" for number in range(1000)), ["a999", "b999"]),
        (draw_with_rich(), ["first", "second"]),
        ("one\r\ntwo\x1b[31m red\r\n", ["one", "two\\x1b[31m red"]),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_the_log_and_the_terminal_show_the_last_state(
    output: str, last: list[str], size: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    display = ProgressDisplay()
    display.on_start(1, "here", "/results", ReportSpec(), "quick-fox")
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
        assert "first" not in last or all("100%" in line for line in shown)
    assert format_rows([result], shows_output=True)[1][-2].strip()
