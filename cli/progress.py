"""Progress while a flow runs, on standard error: live on a terminal, in plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from ..flows.listener import FlowListener
from ..flows.plans.rlm import NOUN as QUESTION
from ..flows.reporting.summary import RunSummary
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.queries.records import RlmEvent
from ..sandbox.result import Outcome
from ..tasks.ledger.run_record import ReportSpec
from ..tasks.redrawn_lines import RedrawnLines
from .option_names import name_options

if TYPE_CHECKING:
    from ..flows.orphans import OrphanedSandbox

MAX_LINE_CHARACTERS = 100_000  # characters of a line in the live output of a single execution
PLAIN_WIDTH = 160  # characters of a turn's line without a terminal
MIN_TURN_WIDTH = 40  # characters of a turn's line on a narrow terminal
PLAIN_INTERVAL_SECONDS = 5.0  # seconds between two lines without a terminal


def print_reading(text: str) -> None:
    """Print the progress of reading an inputs file, which happens before the display starts."""
    print(escape_text(text), file=sys.stderr, flush=True)


class ProgressDisplay(FlowListener):
    """A listener that displays the done, failed and running executions and the remaining time.

    The display ends with the context of the object. A run of one execution also shows the code's output.
    """

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
        self._summary = RunSummary(ReportSpec())
        self._total = self._cached = 0
        self._running: set[int] = set()
        self._started_at = self._printed_at = time.monotonic()
        self._code_began_at = math.inf  # the earliest time at which code of this run ran
        self.results_path = self.run_name = ""
        self._output = {stream: RedrawnLines(MAX_LINE_CHARACTERS) for stream in ("stdout", "stderr")}
        self.orphans: list[OrphanedSandbox] = []  # Sandboxes that the reap flow removed, or would remove.

    @property
    def spec(self) -> ReportSpec:
        """The settings of the run's reports."""
        return self._summary.spec

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._live:
            self._progress.stop()
        if self._total and (self._summary.done or error_type is None):
            self._console.print(self._summarize(), highlight=False, markup=False)

    def on_prefect_start(self) -> None:
        from prefect.settings import PREFECT_API_URL, PREFECT_HOME

        text = "waiting for the Prefect server" if PREFECT_API_URL.value() else "starting Prefect"
        if not PREFECT_API_URL.value() and not (PREFECT_HOME.value() / "prefect.db").exists():
            text += " (half a minute the first time)"
        if self._live:
            self._progress.update(self._task, description=text)
        else:
            self._print(text)

    def on_start(self, total: int, environment: str, results_path: str, summary: RunSummary, run_name: str) -> None:
        self._total, self.results_path, self.run_name, self._summary = total, results_path, run_name, summary
        self._started_at = self._printed_at = time.monotonic()
        noun = "execution" if total == 1 else "executions"
        self._print(f"{total} {noun} {environment}")
        self._progress.reset(self._task, total=total, description="running", counts="")

    def on_page(self, page: str) -> None:
        self._print(f"Page: {page}")

    def on_warning(self, text: str) -> None:
        self._print(escape_text(name_options(text)))

    def on_execution_start(self, index: int) -> None:
        self._running.add(index)
        self._refresh()

    def on_output(self, index: int, stream: str, text: str) -> None:
        if self._total != 1:
            return
        for line in self._output[stream].feed(text):
            self._print_output(line)

    def on_rlm_event(self, index: int, event: RlmEvent) -> None:
        is_shown = self._total == 1 or self.spec.noun == QUESTION
        if event.kind == "output" and is_shown:
            prefix = "" if self._total == 1 else f"{self.spec.noun} {index}, "
            width = max(MIN_TURN_WIDTH, self._console.width) if self._live else PLAIN_WIDTH
            self._print(prefix + _describe_turn(event, width - len(prefix)))

    def on_outcome(self, outcome: Outcome, *, cached: bool) -> None:
        for lines in self._output.values():
            for line in lines.finish():
                if line:
                    self._print_output(line)
        self._cached += cached and not outcome.meta.is_reduction
        if not cached:
            self._code_began_at = min(self._code_began_at, time.monotonic() - outcome.meta.seconds)
        if outcome.meta.index is not None:
            self._running.discard(outcome.meta.index)
        # The lane starts its next execution now. A line before that start would count one running execution too few.
        is_last = self._summary.done + len(self._running) >= self._total
        if self._live or cached or is_last:
            self._refresh()

    def on_orphans(self, orphans: "Sequence[OrphanedSandbox]") -> None:
        self.orphans = list(orphans)

    def _refresh(self) -> None:
        if self._live:
            self._progress.update(self._task, completed=self._summary.done, counts=self._describe_counts())
            return
        now, done = time.monotonic(), self._summary.done
        if now >= self._printed_at + PLAIN_INTERVAL_SECONDS and done < self._total:
            self._printed_at = now
            line = f"{done} of {self._total} done, {self._describe_counts()}"
            if done > self._cached:  # The estimate has no time for the installation in the sandboxes.
                seconds_each = (now - self._code_began_at) / (done - self._cached)
                line += f", about {seconds_each * (self._total - done):.0f} s left"
            self._print(line)

    def _describe_counts(self) -> str:
        summary, best = self._summary, self._summary.best
        counts = f"{summary.failed} failed, {len(self._running)} running"
        if summary.pruned:
            counts = f"{summary.pruned} pruned, {counts}"
        if best.score is not None:
            counts += f", best {best.score:.6g}"
        elif best.results:
            counts += f", {len(best.results)} on the front"
        return counts

    def _summarize(self) -> str:
        cached = f", {self._cached} from earlier runs" if self._cached else ""
        seconds = time.monotonic() - self._started_at
        return f"{self._summary.count_outcomes(self._total)}{cached}; it took {seconds:.1f} s"

    def _print_output(self, line: str) -> None:
        self._print(escape_text(line, keep="\t"))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _describe_turn(turn: RlmEvent, width: int) -> str:
    """Return a line about a turn: the model's plan, the output of its code, its queries, its seconds and its cost."""
    start = f"turn {turn.turn}: "
    if turn.depth > 1:
        start = f"depth {turn.depth}, {start}"
    details = f"{turn.seconds:.1f} s"
    if turn.queries:
        noun = "query" if turn.queries == 1 else "queries"
        details = f"{turn.queries:,} {noun}, {details}"
    if turn.usage.cost:
        details += f", ${turn.usage.cost:.4f}"
    details = f" ({details})"
    plan = _take_line(turn.reasoning) or _take_line(turn.code)
    output = _take_line(turn.output, is_last=turn.failed)  # The last line of a traceback has the error.
    if turn.failed:
        output = f"failed: {output}"
    free_width = width - len(start) - len(details)
    if plan and output:  # The plan gets what the output leaves, but at least a half.
        arrow = " -> "
        plan = _cut(plan, max(free_width // 2, free_width - len(output) - len(arrow))) + arrow
    return start + _cut(plan + output, free_width) + details


def _take_line(text: str, *, is_last: bool = False) -> str:
    """Return the first or the last line of a text that is not blank, escaped."""
    lines = text.strip().splitlines()
    return escape_text(lines[-1 if is_last else 0].strip()) if lines else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
