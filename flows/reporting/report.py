"""The report on a run: its figures, its charts, a table with the best first, the displays of code, and the failures."""

import base64
import binascii
import json
import time
from collections.abc import Sequence
from typing import Any

from ...sandbox.errors import NotRun
from ...sandbox.meta import Meta, QuerySummary
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Failure
from ...tasks.ledger.run_record import ReportSpec, RunRecord
from ..search.importances import Importances
from .charts import build_charts
from .document import (
    Files,
    Heading,
    Markup,
    PageSection,
    Part,
    Picture,
    SectionPart,
    Table,
    Text,
    Verbatim,
)
from .groups import describe_repeats
from .summary import MAX_PARTS, MAX_ROWS, RunSummary
from .table import BEST_MARK, NO_FEASIBLE_TRIAL, format_cell, format_variables

# Why executions have no result, by the run's status.
WHY_MISSING = {
    "running": ", because the run is still running",
    "killed": ", because the run was killed",
    "ended": ", because the run ended before them",
    None: ": the run is still running, or was killed",
}
MAX_FULL_TEXTS = 20  # failures, or fields of a single result, that are shown in full
MAX_VARIABLES = 8  # variables that identify an execution in a line
# Forms of a display that a page can show: pictures, HTML and text.
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
SVG, HTML, TEXT = "image/svg+xml", "text/html", "text/plain"


def build_report(
    summary: RunSummary, records: Sequence[RunRecord], importances: Importances | None = None
) -> list[Part]:
    """Return the report as parts of a document.

    Args:
        summary: The outcomes.
        records: All runs that wrote to the ledger, the latest last.
        importances: The importance of each variable of a search; None if it is unknown.
    """
    record = records[-1]
    parts: list[Part] = [Heading(f"{record.flow}: {record.name}" if record.name else record.flow, 1)]
    outcome, *rest = build_summary_rows(summary, records, importances)
    parts.append(Table(outcome, rest))
    parts += build_charts(summary, importances)
    if summary.done == 1 and summary.first_result is not None:
        for name, value in list(summary.first_result.outputs.items())[:MAX_FULL_TEXTS]:
            parts += [Heading(name), Verbatim(value if isinstance(value, str) else format_cell(value))]
    header, *rows = summary.build_rows(shows_usage=summary.cpu_seconds is not None)
    if rows:
        title = f"{summary.spec.noun}s".capitalize()
        parts.append(Heading(title if summary.best.result is None else f"{title}, the best first"))
        best = next((number for number, row in enumerate(rows) if row[-1] == BEST_MARK), None)
        parts.append(Table(header, rows, best))
        count = summary.done if summary.spec.repeats is None else summary.spec.repeats.groups
        if count > MAX_ROWS:
            parts.append(Text(f"{count - MAX_ROWS:,} more are in the ledger."))
        if summary.table.columns.is_cut:
            parts.append(Text("Some variables or fields have no column here; the ledger has all."))
    return parts + _build_display_parts(summary) + _build_failure_parts(summary)


def build_summary_rows(
    summary: RunSummary, records: Sequence[RunRecord], importances: Importances | None = None
) -> list[list[str]]:
    """Return the rows of the report's table of figures: a name and its value."""
    record, spec = records[-1], summary.spec
    noun = spec.noun if spec.repeats is None else "execution"
    counts = f"{summary.succeeded:,} of {max(record.total, summary.done):,} {noun}s succeeded"
    others = [
        (summary.pruned, "of them pruned"),
        (summary.failed, "failed"),
        (summary.not_run, "not run"),
        (summary.retried, "tried more than once"),
    ]
    counts += "".join(f", {count:,} {text}" for count, text in others if count)
    if summary.unfinished:
        counts += f"; {summary.unfinished:,} did not run to the end, so rates leave them out"
    if summary.silent and spec.noun != "step":  # A step may pass its names on instead of calling SUBMIT.
        counts += f"; {summary.silent:,} did not call SUBMIT"
    if summary.exited:
        counts += f"; {summary.exited:,} called sys.exit before SUBMIT"
    rows = [["Outcome", counts]]
    if spec.repeats is not None:
        ran = f"each of {spec.repeats.groups:,} {spec.noun}s ran {spec.repeats.count:,} times"
        rows.append(["Repeats", f"{ran}. {describe_repeats(spec, summary.incomplete)}"])
    missing = record.total - summary.done
    if missing > 0:
        rows.append(["Missing", f"{missing:,} have no result{WHY_MISSING[record.get_status()]}"])
    if spec.objective is not None:
        rows.append([f"Best {spec.objective}", _describe_best_trial(summary) or _explain_no_best(summary)])
    if len(spec.objectives) > 1:
        rows.append(["Pareto front", _describe_front(summary) or _explain_no_best(summary)])
    if spec.constraints:
        rows.append(
            ["Infeasible", f"{summary.infeasible:,} {spec.noun}s, with {' or '.join(spec.constraints)} above 0"]
        )
    if importances is not None:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in [*importances.shares.items()][:MAX_VARIABLES])
        advice = f"; {importances.advice}" if importances.advice else ""
        rows.append(["Importance", f"{shares} ({importances.method}{advice})"])
    if record.stopped:
        rows.append(["Stopped", record.stopped])
    if record.began:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.began))
        if record.ended is None:
            rows.append(["Begun", began])
        else:
            which = "of the last run of several, " if len(records) > 1 else ""
            rows.append(["Time", f"{_format_duration(record.ended - record.began)}, {which}from {began}"])
    rows.append(["Code ran", f"{_format_duration(summary.seconds)} of all {spec.noun}s together"])
    if summary.cpu_seconds is not None:
        peak = "" if summary.peak_mib is None else f"; at most {summary.peak_mib:,.1f} MiB, in {summary.peak_index}"
        rows.append(["CPU and memory", f"{_format_duration(summary.cpu_seconds)} of CPU time{peak}"])
    opened, open_for = sum(r.sandboxes for r in records), sum(r.sandbox_seconds for r in records)
    if opened:
        rows.append(["Sandboxes", f"{opened:,} opened, {_format_duration(open_for)} together"])
    if summary.collected or summary.not_collected:
        notes = f"; notes on others: {summary.not_collected:,}" if summary.not_collected else ""
        rows.append(["Files", f"{summary.collected:,} collected{notes}"])
    rows.append(["Provider", ", ".join(name for name in summary.providers if name) or record.provider])
    if summary.usage.calls or summary.asked:
        used = describe_usage(summary.usage, summary.cached)
        rows.append(["Queries", f"{summary.asked:,} asked; the model was called {used}"])
    total = summary.total_usage
    if total is not None and total.calls > summary.usage.calls:
        used = describe_usage(total, 0)
        rows.append(["Queries in all", f"the model was called {used}, including attempts that do not count"])
    rows.append(["Results", record.results_path])
    return rows


def describe_run(record: RunRecord, summary: RunSummary) -> str:
    """Return in a line how many executions of a run succeeded, and the best trial if there is one."""
    return describe_counts(record.report_spec, record.total, summary)


def describe_counts(spec: ReportSpec, total: int, summary: RunSummary) -> str:
    """Return in a line how many of `total` executions succeeded, and the best trial if there is one."""
    noun = spec.noun if spec.repeats is None else "execution"
    text = f"{summary.succeeded:,} of {total:,} {noun}s succeeded"
    text += f", {summary.unfinished:,} did not run to the end" if summary.unfinished else ""
    if summary.infeasible and not summary.best.results:
        return f"{text}; {NO_FEASIBLE_TRIAL}"
    best = _describe_best_trial(summary)
    return f"{text}; best {spec.objective} {best}" if best else text


def _explain_no_best(summary: RunSummary) -> str:
    return f"none: {NO_FEASIBLE_TRIAL}" if summary.infeasible else "none"


def _describe_best_trial(summary: RunSummary) -> str:
    best, score = summary.best.result, summary.best.score
    if best is None:
        return ""
    values = format_variables(best.meta.variables, MAX_VARIABLES)
    return f"{score:.6g} in trial {best.meta.index}" + (f" with {values}" if values else "")


def _describe_front(summary: RunSummary) -> str:
    numbers = [str(result.meta.index) for result in summary.best.results]
    more = f" and {len(numbers) - MAX_VARIABLES} more" if len(numbers) > MAX_VARIABLES else ""
    goals = ", ".join(f"{item.direction} {item.name}" for item in summary.spec.objectives)
    return f"{len(numbers)} trials ({', '.join(numbers[:MAX_VARIABLES])}{more}) by {goals}" if numbers else ""


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


def _build_display_parts(summary: RunSummary) -> list[Part]:
    """Return the displays and the collected files of each execution.

    Code chose every byte. SVG is shown as an image, which runs nothing. HTML is shown in a frame that runs nothing.
    """
    metas, omitted_count, noun = summary.displays.metas, summary.displays.omitted_count, summary.spec.noun
    if not metas and not omitted_count:
        return []
    parts: list[SectionPart] = []
    for meta in sorted(metas, key=lambda meta: meta.index or 0):
        values = format_variables(meta.variables, MAX_VARIABLES)
        parts.append(Heading(f"{noun.capitalize()} {meta.index}" + (f" with {values}" if values else ""), 3))
        parts += _build_execution_parts(meta)
    if omitted_count:
        parts.append(Text(f"The displays of {omitted_count:,} more are in the ledger."))
    count = len(metas) + omitted_count
    mention = (
        f"The displays and files of {count:,} {noun}{'' if count == 1 else 's'} are in the page that "
        "rlm-batch report writes."
    )
    return [Heading("Shown"), PageSection(parts, mention)]


def _build_execution_parts(meta: Meta) -> list[SectionPart]:
    parts: list[SectionPart] = [_build_display_part(display) for display in meta.displays[:MAX_PARTS]]
    if len(meta.displays) > MAX_PARTS:
        parts.append(Text(f"{len(meta.displays) - MAX_PARTS:,} more displays are in the ledger."))
    if meta.value is not None:
        parts.append(Verbatim(json.dumps(meta.value, ensure_ascii=False)))
    elif meta.value_repr is not None and all(display.get(TEXT) != meta.value_repr for display in meta.displays):
        parts.append(Verbatim(meta.value_repr))
    if meta.collected:
        parts.append(Files(list(meta.collected[:MAX_PARTS])))
    if len(meta.collected) > MAX_PARTS:
        parts.append(Text(f"{len(meta.collected) - MAX_PARTS:,} more files are beside them."))
    if meta.not_collected:
        parts += [Text("Not collected:"), Verbatim("\n".join(meta.not_collected))]
    return parts


def _build_display_part(display: dict[str, Any]) -> Picture | Markup | Verbatim:
    """Return the best form of a display that a page can show: a picture, then HTML, then text."""
    for name in IMAGES:
        data = display.get(name)
        if isinstance(data, str):
            try:
                decoded = base64.b64decode("".join(data.split()), validate=True)
            except (binascii.Error, ValueError):
                continue
            return Picture.from_bytes(name, decoded, f"{name}, {len(decoded):,} bytes")
    svg, html, text = display.get(SVG), display.get(HTML), display.get(TEXT)
    if isinstance(svg, str):
        return Picture.from_svg(svg, f"{SVG}, {len(svg.encode('utf-8', 'replace')):,} bytes")
    if isinstance(html, str):
        return Markup(html, f"{HTML}, {len(html.encode('utf-8', 'replace')):,} bytes")
    return Verbatim(text if isinstance(text, str) else f"[{', '.join(display)}: this page cannot show it]")


def _build_failure_parts(summary: RunSummary) -> list[Part]:
    """Return how often each reason occurred, and the first failure for each of the first reasons in full."""
    reasons = summary.failures.sort()
    if not reasons:
        return []
    rows = [[f"{reason.count:,}", str(reason.numbers[0]), reason.describe_error()] for reason in reasons]
    parts: list[Part] = [Heading("Failures"), Table(["count", "first", "what"], rows)]
    for reason in reasons[:MAX_FULL_TEXTS]:
        if not isinstance(reason.first.error, NotRun):
            title = f"{summary.spec.noun.capitalize()} {reason.numbers[0]}: {type(reason.first.error).__name__}"
            parts += [Heading(title, 3), Verbatim(_describe_failure(reason.first))]
    if summary.failures.others:
        parts.append(Text(f"{summary.failures.others:,} more failures are in the ledger."))
    return parts


def _describe_failure(failure: Failure) -> str:
    error = failure.error
    values = format_variables(failure.meta.variables, MAX_VARIABLES)
    earlier = "".join(f"\nbefore that: {text}" for text in failure.meta.earlier_errors[:5])
    traceback = getattr(error, "traceback", "")
    more = f"\n{traceback}" if traceback and traceback not in str(error) else ""
    return (f"with {values}\n" if values else "") + f"{error}{more}{earlier}"
