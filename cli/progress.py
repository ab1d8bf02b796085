"""What a person sees: progress while a flow runs, live on a terminal and in plain lines elsewhere; then a table."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..flows.engine.events import FlowListener
from ..sandbox.result import Failure, Outcome
from ..sandbox.text_escape import escape_text

PLAIN_INTERVAL = 5.0  # seconds between two lines where there is no terminal
TABLE_ROWS = 200  # of a table that are printed; the ledger has all


class Display(FlowListener):
    """Progress on standard error: done, failed, running, and the time that is left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None, counts="")
        self._total = self._done = self._failed = self._cached = self._running = 0
        self._begun = self._told = time.monotonic()
        self.results_path = ""

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()
        if self._total and (self._done or kind is None):
            self._console.print(self._summary(), highlight=False, markup=False)

    def starting(self, *, embedded: bool) -> None:
        """The time before the flow run begins, in which Prefect may start a server of its own."""
        what = "starting Prefect (half a minute the first time)" if embedded else "waiting for the Prefect server"
        if self._live:
            self._progress.update(self._task, description=what)
        else:
            self._print(what)

    def on_start(self, total: int, environment: str, results_path: str) -> None:
        self._total, self.results_path = total, results_path
        self._begun = self._told = time.monotonic()
        self._print(f"{total} executions; {environment}")
        self._progress.reset(self._task, total=total, description="running", counts="")

    def on_warning(self, text: str) -> None:
        self._print(escape_text(text))

    def on_execution_start(self, index: int) -> None:
        self._running += 1
        if self._live:
            self._refresh()

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        self._done += 1
        self._failed += isinstance(outcome, Failure)
        self._cached += cached
        self._running -= not cached
        self._refresh()

    def _refresh(self) -> None:
        if self._live:
            self._progress.update(self._task, completed=self._done, counts=self._counts())
            return
        now = time.monotonic()
        if now >= self._told + PLAIN_INTERVAL and self._done < self._total:
            self._told = now
            line = f"{self._done} of {self._total} done, {self._counts()}"
            if self._done:
                left = (now - self._begun) / self._done * (self._total - self._done)
                line += f", about {left:.0f} s left"
            self._print(line)

    def _counts(self) -> str:
        return f"{self._failed} failed, {self._running} running"

    def _summary(self) -> str:
        seconds = time.monotonic() - self._begun
        cached = f", {self._cached} from earlier runs" if self._cached else ""
        counts = f"{self._done - self._failed} succeeded{cached}, {self._failed} failed"
        return f"{self._done} of {self._total} done in {seconds:.1f} s: {counts}"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_table(rows: list[list[str]], total: int, mark: str = "") -> None:
    """Prints rows of text on standard output, the header first; the row whose last cell is `mark` stands out.

    Of the `total` that there are it prints `TABLE_ROWS`, and the marked one wherever it is.
    """
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # whoever reads it elsewhere wants whole lines
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(escape_text(name), overflow="fold")
    for row in rows[1 : TABLE_ROWS + 1]:
        table.add_row(*map(escape_text, row), style="bold green" if mark and row[-1] == mark else None)
    if mark:  # the one row that must not be among those left out
        for row in rows[TABLE_ROWS + 1 :]:
            if row[-1] == mark:
                table.add_row(*map(escape_text, row), style="bold green")
    console.print(table, highlight=False, markup=False)
    if total > TABLE_ROWS:
        print(f"... and {total - TABLE_ROWS} more, in the ledger", file=sys.stderr)
