"""The report on a run: a summary, a chart, a table with the best first, and failures with their messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...sandbox.budget import Usage
from ...sandbox.errors import RlmBatchError
from ...tasks.ledger.run_record import RunRecord
from .document import Heading, Part, Picture, Table, Text, Verbatim
from .summary import ROWS, TOLD, RunSummary
from .svg_chart import draw_heat_map, draw_series
from .text_table import format_cell

SPAN = 1e200  # of values in a chart: what is wider has no axis


def build_report(tally: RunSummary, records: Sequence[RunRecord]) -> list[Part]:
    """The page on what was counted; the last of `records` is the run that it is on, those before it wrote there too."""
    record = records[-1]
    parts: list[Part] = [Heading(f"{record.flow}: {record.name}" if record.name else record.flow, 1)]
    outcome, *rest = build_summary_rows(tally, records)
    parts.append(Table(outcome, rest))
    parts += build_charts(tally)
    alone = tally.single if tally.done == 1 else None
    if alone is not None:
        for name, value in list(alone.outputs.items())[:TOLD]:
            parts += [Heading(name), Verbatim(value if isinstance(value, str) else format_cell(value))]
    rows = build_table_rows(tally)
    if len(rows) > 1:
        what = f"{tally.about.noun}s"
        parts.append(Heading(what.capitalize() if tally.best is None else f"{what.capitalize()}, the best first"))
        best = next((number for number, row in enumerate(rows[1:]) if row[-1] == "best"), None)
        parts.append(Table(rows[0], rows[1:], best))
        if tally.done > ROWS:
            parts.append(Text(f"{tally.done - ROWS:,} more are in the ledger."))
        if tally.left_out:
            parts.append(Text("Some variables or fields have no column here; the ledger has all."))
    return parts + build_failure_parts(tally)


def build_summary_rows(tally: RunSummary, records: Sequence[RunRecord]) -> list[list[str]]:
    """The summary's rows: what, and how much."""
    record = records[-1]
    about = tally.about
    said = f"{tally.succeeded:,} of {max(record.total, tally.done):,} {about.noun}s succeeded"
    parts = [(tally.failed, "failed"), (tally.not_run, "not run"), (tally.retried, "tried more than once")]
    said += "".join(f", {count:,} {text}" for count, text in parts if count)
    rows = [["Outcome", said]]
    missing = record.total - tally.done
    if missing > 0:
        rows.append(["Missing", f"{missing:,} have no result: the run was ended before, or is not over"])
    if about.objective is not None:
        rows.append([f"Best {about.objective}", describe_best_trial(tally) or "none"])
    if record.began and record.ended is not None:
        rows.append(["Time", f"{format_duration(record.ended - record.began)}, from {_format_time(record.began)}"])
    elif record.began:
        rows.append(["Begun", _format_time(record.began)])
    rows.append(["Code ran", f"{format_duration(tally.seconds)} of all {about.noun}s together"])
    opened, open_for = sum(r.sandboxes for r in records), sum(r.sandbox_seconds for r in records)
    if opened:
        rows.append(["Sandboxes", f"{opened:,} opened, {format_duration(open_for)} together"])
    rows.append(["Provider", ", ".join(name for name in tally.providers if name) or record.provider])
    if tally.calls or tally.asked:
        used = Usage(tally.calls, tally.prompt_tokens, tally.completion_tokens, tally.cost)
        rows.append(["Queries", f"{tally.asked:,} asked; the model was called {describe_usage(used)}"])
    rows.append(["Results", record.results_path])
    return rows


def describe_best_trial(tally: RunSummary) -> str:
    """The best trial in a line, empty where there is none."""
    if tally.best is None or tally.best_score is None:
        return ""
    variables = list(tally.best.meta.variables.items())[:8]
    values = ", ".join(f"{name}={format_cell(value)}" for name, value in variables)
    return f"{tally.best_score:.6g} in trial {tally.best.meta.index}" + (f" with {values}" if values else "")


def build_table_rows(tally: RunSummary) -> list[list[str]]:
    """Rows of text, the header first: number, variables, fields, seconds, and what became of it."""
    variables, fields = list(tally.variables), [name for name in tally.fields if name not in tally.variables]
    rows = [["", *variables, *fields, "seconds", ""]]
    winner = None if tally.best is None else tally.best.meta.index
    for row in tally.rows():
        cells = [row.variables.get(name, "") for name in variables] + [row.fields.get(name, "") for name in fields]
        seconds = f"{row.seconds:.3g}" if row.seconds else ""
        note = "best" if not row.note and winner is not None and row.index == winner else row.note
        rows.append([str(row.index), *cells, seconds, note])
    return rows


def build_charts(tally: RunSummary) -> list[Part]:
    """The chart of the objective (or, where there is none, of the seconds), and the heat map of two variables."""
    values = [value for _, _, value in tally.points]
    if len(values) < 2 or max(values) - min(values) > SPAN:
        return []
    about = tally.about
    what = about.objective or "seconds"
    drawn = draw_series(
        [(index, value) for index, _, value in tally.points],
        title=f"{what} over {about.noun}s",
        across=about.noun,
        up=what,
        failed=tally.crosses,
        best=about.direction if about.objective is not None else None,
    )
    parts: list[Part] = [Picture(drawn, f"{what} over {about.noun}s")]
    if about.objective is None:
        return parts
    names = [name for name in tally.variables if len({repr(v.get(name))[:200] for _, v, _ in tally.points}) > 1]
    if len(names) == 2 and all(_is_short_value(v.get(name)) for _, v, _ in tally.points for name in names):
        across, up = names
        drawn = draw_heat_map(
            [(variables.get(across), variables.get(up), value) for _, variables, value in tally.points],
            title=f"{what} over {across} and {up}",
            across=across,
            up=up,
            value=what[:12],
            best=about.direction,
        )
        if drawn is not None:
            parts.append(Picture(drawn, f"{what} over {across} and {up}"))
    return parts


def build_failure_parts(tally: RunSummary) -> list[Part]:
    """What went wrong: how often each message came, and the first failures in full."""
    if not tally.kinds:
        return []
    kinds = sorted(tally.kinds.values(), key=lambda kind: (-kind.count, kind.first))
    parts: list[Part] = [Heading("Failures")]
    parts.append(Table(["count", "first", "what"], [[f"{kind.count:,}", str(kind.first), kind.text] for kind in kinds]))
    for failure in sorted(tally.failures, key=lambda failure: failure.meta.index or 0):
        what = tally.about.noun.capitalize()
        parts += [
            Heading(f"{what} {failure.meta.index}: {type(failure.error).__name__}", 3),
            Verbatim(_describe_failure(failure)),
        ]
    if tally.failed > len(tally.failures):
        parts.append(Text(f"{tally.failed - len(tally.failures):,} more failures are in the ledger."))
    return parts


def _describe_failure(failure: Any) -> str:
    error: RlmBatchError = failure.error
    values = ", ".join(f"{name}={format_cell(value)}" for name, value in list(failure.meta.variables.items())[:8])
    earlier = "".join(f"\nbefore that: {text}" for text in failure.meta.earlier_errors[:5])
    traceback = getattr(error, "traceback", "")
    more = f"\n{traceback}" if traceback and traceback not in str(error) else ""
    return (f"with {values}\n" if values else "") + f"{error}{more}{earlier}"


def describe_usage(used: Usage) -> str:
    """What calls of a model took, for a person."""
    price = "at a cost that is not known" if used.cost is None else f"for ${used.cost:.6f}"
    return f"{used.calls} times: {used.prompt_tokens:,} + {used.completion_tokens:,} tokens, {price}"


def format_duration(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _is_short_value(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 200)
