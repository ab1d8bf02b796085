"""The report on a run: a summary, a chart, a table with the best first, and failures with their messages."""

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from ...sandbox.queries.budget import Usage
from ...sandbox.result import Failure
from ...tasks.ledger.run_record import RunRecord
from .charts.pictures import build_charts
from .columns import VARIABLES, name_columns
from .document import Heading, Part, Table, Text, Verbatim
from .markdown import escape_markdown
from .summary import MAX_FULL_TEXTS, MAX_ROWS, Cell, Row, RunSummary
from .text_table import BEST_MARK, PARETO_MARK, format_cell, format_variables

CellT = TypeVar("CellT")
COLUMNS = ("number", "seconds", "outcome")  # of a table, beside those of variables and fields
MAX_VARIABLES = 8  # that tell a trial in a line


def build_report(summary: RunSummary, records: Sequence[RunRecord]) -> list[Part]:
    """The report in parts. The last of `records` is the run that it is on; those before it wrote to its ledger too."""
    record = records[-1]
    parts: list[Part] = [Heading(f"{record.flow}: {record.name}" if record.name else record.flow, 1)]
    outcome, *rest = build_summary_rows(summary, records)
    parts.append(Table(outcome, rest))
    parts += build_charts(summary)
    only = summary.first_result if summary.done == 1 else None
    if only is not None:
        for name, value in list(only.outputs.items())[:MAX_FULL_TEXTS]:
            parts += [Heading(name), Verbatim(value if isinstance(value, str) else format_cell(value))]
    rows = build_table_rows(summary)
    if len(rows) > 1:
        what = f"{summary.spec.noun}s".capitalize()
        parts.append(Heading(what if summary.best_trial.result is None else f"{what}, the best first"))
        best = next((number for number, row in enumerate(rows[1:]) if row[-1] == BEST_MARK), None)
        parts.append(Table(rows[0], rows[1:], best))
        if summary.done > MAX_ROWS:
            parts.append(Text(f"{summary.done - MAX_ROWS:,} more are in the ledger."))
        if summary.has_hidden_columns:
            parts.append(Text("Some variables or fields have no column here; the ledger has all."))
    return parts + summary.displays.build_parts(summary.spec.noun) + build_failure_parts(summary)


def build_summary_rows(summary: RunSummary, records: Sequence[RunRecord]) -> list[list[str]]:
    """The rows of the table of figures at the top: a name, and its value."""
    record = records[-1]
    spec = summary.spec
    counts = f"{summary.succeeded:,} of {max(record.total, summary.done):,} {spec.noun}s succeeded"
    others = [
        (summary.pruned, "of them pruned"),
        (summary.failed, "failed"),
        (summary.not_run, "not run"),
        (summary.retried, "tried more than once"),
    ]
    counts += "".join(f", {count:,} {text}" for count, text in others if count)
    if summary.silent and spec.noun != "step":  # whose names the next step has
        counts += f"; the code of {summary.silent:,} never called SUBMIT"
    rows = [["Outcome", counts]]
    missing = record.total - summary.done
    if missing > 0:
        rows.append(["Missing", f"{missing:,} have no result: the run was ended before, or is not over"])
    if spec.objective is not None:
        rows.append([f"Best {spec.objective}", describe_best_trial(summary) or "none"])
    if spec.objectives:
        rows.append(["Pareto front", describe_front(summary)])
    if record.began and record.ended is not None:
        which = "of the last run of several, " if len(records) > 1 else ""
        span = f"{format_duration(record.ended - record.began)}, {which}from {_format_time(record.began)}"
        rows.append(["Time", span])
    elif record.began:
        rows.append(["Begun", _format_time(record.began)])
    rows.append(["Code ran", f"{format_duration(summary.seconds)} of all {spec.noun}s together"])
    opened, open_for = sum(r.sandboxes for r in records), sum(r.sandbox_seconds for r in records)
    if opened:
        rows.append(["Sandboxes", f"{opened:,} opened, {format_duration(open_for)} together"])
    if summary.collected or summary.not_collected:
        rows.append(["Files", f"{summary.collected:,} collected" + _describe_not_collected(summary)])
    rows.append(["Provider", ", ".join(name for name in summary.providers if name) or record.provider])
    if summary.usage.calls or summary.asked:
        used = describe_usage(summary.usage) + describe_cached(summary.cached)
        rows.append(["Queries", f"{summary.asked:,} asked; the model was called {used}"])
    rows.append(["Results", record.results_path])
    return rows


def _describe_not_collected(summary: RunSummary) -> str:
    return f"; notes on others: {summary.not_collected:,}" if summary.not_collected else ""


def describe_run(record: RunRecord, summary: RunSummary) -> str:
    """How many of a run's executions succeeded, and the best trial where there is one, in a line."""
    text = f"{summary.succeeded:,} of {record.total:,} {record.what}s succeeded"
    best = describe_best_trial(summary)
    return f"{text}; best {record.objective} {best}" if best else text


def describe_best_trial(summary: RunSummary) -> str:
    """The best trial in a line, empty where there is none."""
    best, score = summary.best_trial.result, summary.best_trial.score
    if best is None:
        return ""
    values = format_variables(best.meta.variables, MAX_VARIABLES)
    return f"{score:.6g} in trial {best.meta.index}" + (f" with {values}" if values else "")


def describe_front(summary: RunSummary) -> str:
    """The trials on the Pareto front in a line, and what they are compared by."""
    numbers = [str(result.meta.index) for result in summary.front.results]
    more = f" and {len(numbers) - MAX_VARIABLES} more" if len(numbers) > MAX_VARIABLES else ""
    goals = ", ".join(f"{item.direction} {item.name}" for item in summary.spec.objectives)
    return f"{len(numbers)} trials ({', '.join(numbers[:MAX_VARIABLES])}{more}) by {goals}" if numbers else "none"


def build_table_rows(summary: RunSummary) -> list[list[str]]:
    """Rows of text, the header first: number, variables, fields, seconds, and what became of it."""
    columns = name_columns(summary.variables, summary.fields, ("seconds",))
    rows = [["", *columns, "seconds", ""]]
    best_numbers = {result.meta.index for result in summary.best_trials}
    for row in summary.sort_rows():
        cells = [_get_cell(row, *place, "") for place in columns.values()]
        seconds = f"{row.seconds:.3g}" if row.seconds else ""
        rows.append([str(row.index), *map(format_cell, cells), seconds, _describe_row(row, best_numbers, summary)])
    return rows


def build_table_records(summary: RunSummary, limit: int) -> list[dict[str, Any]]:
    """The first so many of the same rows as dicts by column, in which numbers are numbers.

    Text has a backslash before what Markdown could act on: Prefect's UI takes it for that.
    """
    columns = name_columns(summary.variables, summary.fields, COLUMNS)
    best_numbers = {result.meta.index for result in summary.best_trials}
    return [
        {
            "number": row.index,
            **{column: _escape_cell(_get_cell(row, *place, None)) for column, place in columns.items()},
            "seconds": round(row.seconds, 3),
            "outcome": escape_markdown(_describe_row(row, best_numbers, summary) or "succeeded"),
        }
        for row in summary.sort_rows()[:limit]
    ]


def _escape_cell(cell: Cell | None) -> Cell | None:
    return escape_markdown(cell) if isinstance(cell, str) else cell


def _get_cell(row: Row, source: str, name: str, default: CellT) -> Cell | CellT:
    return (row.variables if source == VARIABLES else row.fields).get(name, default)


def _describe_row(row: Row, best_numbers: set[int | None], summary: RunSummary) -> str:
    mark = PARETO_MARK if summary.spec.objectives else BEST_MARK
    return mark if not row.note and row.index in best_numbers else row.note


def build_failure_parts(summary: RunSummary) -> list[Part]:
    """The failures: how often each message came, and the first of them in full."""
    if not summary.failure_groups:
        return []
    groups = sorted(summary.failure_groups.values(), key=lambda group: (-group.count, group.first))
    rows = [[f"{group.count:,}", str(group.first), group.text] for group in groups]
    parts: list[Part] = [Heading("Failures"), Table(["count", "first", "what"], rows)]
    for failure in sorted(summary.full_failures, key=lambda failure: failure.meta.index or 0):
        title = f"{summary.spec.noun.capitalize()} {failure.meta.index}: {type(failure.error).__name__}"
        parts += [Heading(title, 3), Verbatim(_describe_failure(failure))]
    if summary.failed > len(summary.full_failures):
        parts.append(Text(f"{summary.failed - len(summary.full_failures):,} more failures are in the ledger."))
    return parts


def _describe_failure(failure: Failure) -> str:
    error = failure.error
    values = format_variables(failure.meta.variables, MAX_VARIABLES)
    earlier = "".join(f"\nbefore that: {text}" for text in failure.meta.earlier_errors[:5])
    traceback = getattr(error, "traceback", "")
    more = f"\n{traceback}" if traceback and traceback not in str(error) else ""
    return (f"with {values}\n" if values else "") + f"{error}{more}{earlier}"


def describe_usage(usage: Usage) -> str:
    """The number, tokens and cost of calls of a model, in words."""
    price = "at a cost that is not known" if usage.cost is None else f"for ${usage.cost:.6f}"
    return f"{usage.calls} times: {usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens, {price}"


def describe_cached(count: int) -> str:
    """How many questions were answered without calling the model, to go on `describe_usage` with; empty for none."""
    return f"; {count:,} answers came from the cache" if count else ""


def format_duration(seconds: float) -> str:
    """A time in seconds, minutes or hours, for people."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
