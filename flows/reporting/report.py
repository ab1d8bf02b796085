"""The report on a run: its figures, its charts, a table with the best first, the displays of code, and the failures."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...sandbox.errors import NotRun
from ...sandbox.meta import Meta, QuerySummary
from ...sandbox.queries.budget import Usage
from ...tasks.ledger.run_record import RunRecord
from ..search.importances import Importances
from .charts import build_charts
from .failure_reasons import FailureReason
from .groups import describe_repeats
from .summary import MAX_ROWS, RunSummary, describe_reduction
from .table import MAX_VARIABLES, NO_FEASIBLE_TRIAL, format_cell, format_variables

# Why executions have no result, by the run's status.
WHY_MISSING = {
    "running": ", because the run is still running",
    "killed": ", because the run was killed",
    "ended": ", because the run ended before them",
    None: ": the run is still running, or was killed",
}
MAX_FULL_TEXTS = 20  # failures, or fields of a single result, that are shown in full
MAX_EARLIER_ERRORS = 5  # errors of earlier attempts at an execution


@dataclass(frozen=True, slots=True)
class ReportContent:
    """The content of a report for its templates. The first item of each list of rows is the header."""

    title: str
    noun: str  # the flow's word for an execution
    figures: list[list[str]]  # names and values
    table_title: str
    rows: list[list[str]]  # empty without executions
    notes: Sequence[str] = ()  # sentences below the table
    turns_hint: str = ""  # where the turns of language models are; empty without any
    origin: Sequence[list[str]] = ()  # how the run was made; empty if the record does not say it
    code: Sequence[tuple[str, str]] = ()  # names and texts of the run's code
    charts: Sequence[tuple[str, str]] = ()  # titles and SVG
    fields: Sequence[tuple[str, str]] = ()  # the fields of a single result, as texts
    shown: Sequence[Meta] = ()  # executions with displays or files
    shown_count: int = 0  # number of such executions, including those that `shown` omits
    failures: Sequence[list[str]] = ()  # the table of failures; empty without failures
    full_failures: Sequence[tuple[str, str]] = ()  # a title and a text for each failure that is shown in full
    other_failures: int = 0  # failures that neither of them counts


def build_report(
    summary: RunSummary, records: Sequence[RunRecord], importances: Importances | None = None
) -> ReportContent:
    """Return what a report shows.

    Args:
        summary: The outcomes.
        records: All runs that wrote to the ledger, the latest last.
        importances: The importance of each variable of a search; None if it is unknown.
    """
    record, spec, displays = records[-1], summary.spec, summary.displays
    table_title = f"{spec.noun}s".capitalize()
    if spec.by:
        table_title += f" by {' and '.join(spec.by)}"
    if summary.best.result is not None:
        table_title += ", the best first"
    rows = summary.build_rows(shows_usage=summary.cpu_seconds is not None)
    notes: list[str] = []
    if summary.row_count > MAX_ROWS:
        notes.append(f"{summary.row_count - MAX_ROWS:,} more are in the ledger.")
    if summary.table.columns.is_cut:
        notes.append("Some variables or fields have no column here; the ledger has all.")
    command = f"rlm-batch report {record.name or record.results_path}"
    reasons = summary.failures.sort()
    failures = [[f"{reason.count:,}", str(reason.numbers[0]), reason.describe_error()] for reason in reasons]
    shown_in_full = [reason for reason in reasons[:MAX_FULL_TEXTS] if not isinstance(reason.first.error, NotRun)]
    return ReportContent(
        title=f"{record.flow}: {record.name}" if record.name else record.flow,
        origin=_list_origin(record),
        code=[] if record.origin is None else list(record.origin.code.items()),
        noun=spec.noun,
        figures=build_summary_rows(summary, records, importances),
        charts=build_charts(summary),
        fields=_list_only_fields(summary),
        table_title=table_title,
        rows=rows if len(rows) > 1 else [],
        notes=notes,
        turns_hint=f"{command} writes a page with each turn, its queries and their answers." if summary.asked else "",
        shown=sorted(displays.metas, key=lambda meta: meta.index or 0),
        shown_count=len(displays.metas) + displays.omitted_count,
        failures=[["count", "first", "what"], *failures] if failures else [],
        full_failures=[_describe_failure(reason, spec.noun) for reason in shown_in_full],
        other_failures=summary.failures.others,
    )


def _list_origin(record: RunRecord) -> list[list[str]]:
    """Return the rows about how a run was made: facts, settings of the sandboxes, and options without the code."""
    if record.origin is None:
        return []
    settings = {**record.origin.sandbox, **record.origin.parameters}
    shown = [(name, value) for name, value in settings.items() if name not in record.origin.code]
    options = [[name, format_cell(value)] for name, value in shown if value not in (None, "", [], {})]
    return [["origin", ""], *map(list, record.origin.facts.items()), *options]


def _list_only_fields(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the fields of the result as uncut texts, if the run has a single execution."""
    if summary.done != 1 or summary.first_result is None:
        return []
    fields = list(summary.first_result.outputs.items())[:MAX_FULL_TEXTS]
    return [(name, value if isinstance(value, str) else format_cell(value)) for name, value in fields]


def name_execution(noun: str, meta: Meta) -> str:
    """Return an execution's number and variables in a line."""
    if meta.is_reduction:
        return "Reduction" if noun == "chunk" else "Summary"
    values = format_variables(meta.variables, MAX_VARIABLES)
    return f"{noun.capitalize()} {meta.index}" + (f" with {values}" if values else "")


def build_summary_rows(
    summary: RunSummary, records: Sequence[RunRecord], importances: Importances | None = None
) -> list[list[str]]:
    """Return the rows of the report's table of figures: a name and its value."""
    record, spec = records[-1], summary.spec
    rows = [["Tags", ", ".join(record.tags)]] if record.tags else []
    rows += [["Outcome", _describe_outcomes(summary, record.total)]]
    if summary.reduction is not None:
        rows.append(list(describe_reduction(summary.reduction, spec)))
    if record.judged_run:
        rows.append(["Judged run", record.judged_run])
    if spec.repeats is not None:
        ran = f"each of {spec.repeats.groups:,} {spec.noun}s ran {spec.repeats.count:,} times"
        rows.append(["Repeats", f"{ran}. {describe_repeats(spec, summary.incomplete)}"])
    if spec.by:
        rows.append(["Rows", describe_repeats(spec, 0)])
    missing = record.total - summary.done
    if missing > 0:
        rows.append(["Missing", f"{missing:,} have no result{WHY_MISSING[record.get_status()]}"])
    rows += _build_search_rows(summary, importances)
    if record.stopped:
        rows.append(["Stopped", record.stopped])
    rows += _build_time_rows(summary, records)
    sandboxes = sum(record.sandboxes for record in records)
    sandbox_seconds = sum(record.sandbox_seconds for record in records)
    if sandboxes:
        # Shards do not know how long their sandboxes were open.
        duration = f", {_format_duration(sandbox_seconds)} together" if sandbox_seconds else ""
        rows.append(["Sandboxes", f"{sandboxes:,} opened{duration}"])
    if summary.collected or summary.not_collected:
        notes = f"; notes on others: {summary.not_collected:,}" if summary.not_collected else ""
        rows.append(["Files", f"{summary.collected:,} collected{notes}"])
    rows.append(["Provider", ", ".join(sorted(summary.providers)) or record.provider])
    if summary.usage.calls or summary.asked:
        used = describe_usage(summary.usage, summary.cached)
        rows.append(["Queries", f"{summary.asked:,} asked; the model was called {used}"])
    total = summary.total_usage
    if total is not None and total.calls > summary.usage.calls:
        used = describe_usage(total, 0)
        rows.append(["Queries in all", f"the model was called {used}, including attempts that do not count"])
    rows.append(["Results", record.results_path])
    return rows


def _build_search_rows(summary: RunSummary, importances: Importances | None) -> list[list[str]]:
    """Return the rows about objectives, constraints and the importance of variables."""
    spec = summary.spec
    rows: list[list[str]] = []
    if spec.objectives:
        name = "Pareto front" if spec.objective is None else f"Best {spec.objective}"
        none = f"none: {NO_FEASIBLE_TRIAL}" if summary.infeasible else "none"
        rows.append([name, summary.describe_best_trials() or none])
    if spec.constraints:
        constraints = " or ".join(spec.constraints)
        rows.append(["Infeasible", f"{summary.infeasible:,} {spec.noun}s, with {constraints} above 0"])
    if importances is not None:
        shown = list(importances.shares.items())[:MAX_VARIABLES]
        shares = ", ".join(f"{name} {share:.2f}" for name, share in shown)
        advice = f"; {importances.advice}" if importances.advice else ""
        rows.append(["Importance", f"{shares} ({importances.method}{advice})"])
    return rows


def _build_time_rows(summary: RunSummary, records: Sequence[RunRecord]) -> list[list[str]]:
    """Return the rows about wall time, the code's run time, CPU time and memory."""
    record, noun = records[-1], summary.spec.noun
    rows: list[list[str]] = []
    if record.began:
        time_text = f"from {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(record.began))}"
        if record.ended is not None:
            which = "of the last run of several, " if len(records) > 1 else ""
            time_text = f"{_format_duration(record.ended - record.began)}, {which}{time_text}"
        rows.append(["Time", time_text])
    rows.append(["Code ran", f"{_format_duration(summary.seconds)} of all {noun}s together"])
    if summary.cpu_seconds is not None:
        text = f"{_format_duration(summary.cpu_seconds)} of CPU time"
        if summary.peak_mib is not None:
            text += f"; at most {summary.peak_mib:,.1f} MiB, in {noun} {summary.peak_index}"
        rows.append(["CPU and memory", text])
    return rows


def _describe_outcomes(summary: RunSummary, total: int) -> str:
    """Return the number of executions with each outcome, and how many succeeded in an unusual way."""
    # A step may pass its names on instead of calling SUBMIT.
    silent = 0 if summary.spec.noun == "step" else summary.silent
    others = [
        (summary.retried, ", {:,} tried more than once"),
        (silent, "; {:,} did not call SUBMIT"),
        (summary.exited, "; {:,} called sys.exit before SUBMIT"),
    ]
    return summary.count_outcomes(max(total, summary.done)) + "".join(
        text.format(count) for count, text in others if count
    )


def describe_usage(usage: Usage | QuerySummary, cached_count: int) -> str:
    """Return the number, tokens and cost of a model's calls, and how many answers came from the cache, in words."""
    price = "at an unknown cost" if usage.cost is None else f"for ${usage.cost:.6f}"
    cached = f"; {cached_count:,} answers came from the cache" if cached_count else ""
    return f"{usage.calls} times: {usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens, {price}{cached}"


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _describe_failure(reason: FailureReason, noun: str) -> tuple[str, str]:
    """Return a title and all of the first failure with a reason: variables, error, traceback, and earlier errors."""
    error, meta = reason.first.error, reason.first.meta
    values = format_variables(meta.variables, MAX_VARIABLES)
    lines = [f"with {values}"] if values else []
    lines.append(str(error))
    traceback = getattr(error, "traceback", "")
    if traceback and traceback not in str(error):
        lines.append(traceback)
    lines += [f"before that: {earlier}" for earlier in meta.earlier_errors[:MAX_EARLIER_ERRORS]]
    text = "\n".join(lines)
    return f"{noun.capitalize()} {reason.numbers[0]}: {type(error).__name__}", text
