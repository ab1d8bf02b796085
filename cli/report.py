"""The command `report`: a run's table and queries on the terminal, a page of HTML, exports, and two runs compared."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..blocks.storage.location import Location, replace_atomically
from ..blocks.storage.location_parsing import is_remote, parse_location, parse_scheme
from ..flows.prefect_server import provide_server
from ..flows.reporting.comparison import compare_runs
from ..flows.reporting.conversations import write_conversations
from ..flows.reporting.document import make_excerpt, render_html
from ..flows.reporting.export import write_csv, write_parquet
from ..flows.reporting.ledger_reader import LedgerReader, find_last_run, open_run_ledger
from ..flows.reporting.report import build_report, build_summary_rows, describe_run, describe_usage
from ..flows.reporting.summary import RunSummary
from ..flows.reporting.table import EXIT_NOTE
from ..flows.reports import describe_outcome, get_row_number
from ..flows.search.importances import Importances, compute_importances
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.outcome_json import get_status
from ..sandbox.outcomes.text_escape import escape_json, escape_text
from ..sandbox.queries.budget import Usage
from ..sandbox.result import Failure, Outcome, Result
from .option_names import describe_error
from .output import OutputFormat, print_json, print_outputs, print_table

INDENT = "  "  # indents a query below the query that asked it


def show_report(
    run: str,
    html: str | None,
    csv: str | None,
    parquet: str | None,
    messages: str | None = None,
    *,
    raw_csv: bool = False,
    shows_queries: bool = False,
    output: OutputFormat,
) -> int:
    """Print a run's table, and write its page, by default `report.html` beside the results, and its exports.

    As JSON, standard output has a line for each execution, in order, and nothing else.
    """
    if raw_csv and csv is None:
        raise ConfigurationError("--raw-csv needs --csv: name the file with --csv")
    for option, target in {"--html": html, "--csv": csv, "--parquet": parquet, "--messages": messages}.items():
        if target == "" or is_remote(target):
            raise ConfigurationError(
                f"{option} writes only to this machine, and {target!r} is no local path: write to one and copy the file"
            )
    reader = open_run(run)
    summary = reader.summarize()
    importances = compute_importances(summary)
    for name, value in build_summary_rows(summary, reader.records, importances):
        print(f"{escape_text(name)}: {escape_text(value)}", file=sys.stderr)
    if output.is_json:
        best_numbers = {result.meta.index for result in summary.best.results}
        for outcome in reader.read_outcomes():
            print_json(describe_outcome(outcome, is_best=get_row_number(outcome) in best_numbers))
    else:
        rows = summary.build_rows(shows_usage=output.shows_usage)
        print_table(rows, len(rows) - 1)
        if output.shows_output:
            print_outputs(reader.read_outcomes())
        if shows_queries:
            _print_queries(reader.read_outcomes())
    paths = sys.stderr if output.is_json else sys.stdout
    print(f"Report: {_write_page(reader, summary, importances, html)}", file=paths)
    exports: list[tuple[str | None, str, Callable[[LedgerReader, Path], object]]] = [
        (csv, "CSV", partial(write_csv, raw=raw_csv)),
        (parquet, "Parquet", write_parquet),
        (messages, "Messages", write_conversations),
    ]
    for file, kind, write in exports:
        if file:
            path = Path(file).expanduser().absolute()
            _write(path, partial(write, reader))
            print(f"{kind}: {path}", file=paths)
    return 0


def find_last_path() -> str:
    """Return the results of the run that began last, and print its name.

    Raises:
        ConfigurationError: There is no run.
    """
    record = find_last_run()
    print(f"Run: {escape_text(record.name)}, the last one", file=sys.stderr)
    return record.results_path


def show_comparison(runs: Sequence[str], output: OutputFormat) -> int:
    """Print how the outcomes of two runs differ, or as JSON a line for each pair of executions."""
    readers = [open_run(run) for run in runs]
    summaries = [reader.summarize() for reader in readers]
    comparison = compare_runs(*readers)
    for letter, reader, summary in zip("AB", readers, summaries, strict=True):
        record = reader.records[-1]
        name = record.name or str(reader.ledger.path)
        print(f"{letter}: {escape_text(f'{name}, {describe_run(summary, record.total)}')}", file=sys.stderr)
    counts = [f"{count:,} {text}" for text, count in comparison.count_pairs().items() if count]
    print(", ".join(counts) or "no executions", file=sys.stderr)
    for name in comparison.fields:
        print(escape_text(f"{name}: {comparison.describe_field(name)}"), file=sys.stderr)
    if output.is_json:
        for pair in comparison.pairs:
            print_json(comparison.to_json(pair))
    else:
        print_table(comparison.list_rows(), len(comparison.pairs))
    return 0


def show_execution(run: str, number: int, output: OutputFormat) -> int:
    """Print all of one execution: variables, fields or the error, and the text that the code printed.

    Raises:
        ConfigurationError: The run has no execution with this number.
    """
    reader = open_run(run)
    outcome = next((item for item in reader.read_outcomes() if item.meta.index == number), None)
    if outcome is None:
        raise ConfigurationError(f"{reader.ledger.path} has no execution {number}: rlm-batch report {run} lists them")
    if output.is_json:
        print_json(describe_outcome(outcome))
        return 0
    meta = outcome.meta
    status = get_status(outcome)
    if status == "exited":
        status = EXIT_NOTE
    print(
        f"execution {number} {status}, {meta.seconds:.3g} s, in {escape_text(meta.provider)} {meta.isolation}".rstrip()
    )
    values = {**meta.variables, **(outcome.outputs if isinstance(outcome, Result) else {})}
    for name, value in values.items():
        print(f"{escape_text(name)} = {escape_json(json.dumps(value, ensure_ascii=False))}")
    if isinstance(outcome, Failure):
        print(f"\n{type(outcome.error).__name__}: {describe_error(outcome.error)}")
    for text in meta.earlier_errors:
        print(f"earlier attempt: {escape_text(text)}")
    if meta.judged is not None:
        _print_judged(meta.judged)
    print_outputs([outcome])
    return 0


def _print_judged(judged: dict[str, Any]) -> None:
    """Print what the check of an execution has judged, and what the check itself printed."""
    print("\nThe check judged:")
    for name, value in judged.get("outputs", {}).items():
        print(f"{INDENT}{escape_text(name)} = {escape_json(json.dumps(value, ensure_ascii=False))}")
    if not judged.get("submitted"):
        print(f"{INDENT}nothing submitted")
    for name, text in (("error", judged.get("error")), ("the check printed", judged.get("check_stdout"))):
        for line in _format_text(text or "", f"{name}: "):
            print(line)


def open_run(run: str) -> LedgerReader:
    """Open the ledger of a run, or the ledger at a path or a location. Raises ConfigurationError."""
    reader = asyncio.run(_open_below_block(run)) if parse_scheme(run) == "block" else open_run_ledger(run)
    if reader.note:
        print(escape_text(reader.note), file=sys.stderr)
    return reader


def _write_page(
    reader: LedgerReader, summary: RunSummary, importances: Importances | None, html: str | None
) -> Path | Location:
    """Write the page of HTML, by default beside the results, and return its path or location."""
    page = parse_location(html) if html else reader.ledger.path / "report.html"
    folder = str(page).rpartition("/")[0] if isinstance(page, Location) else str(page.absolute().parent)
    text = render_html(build_report(summary, reader.records, importances), folder)
    data = text.encode("utf-8", "replace")
    if isinstance(page, Path):
        _write(page, lambda path: path.write_bytes(data))
        return page
    try:
        page.write(data)
    except OSError as error:
        raise ConfigurationError(f"{page} cannot be written ({error.strerror}): name a file with --html") from None
    return page


async def _open_below_block(run: str) -> LedgerReader:
    """Open the ledger at a location of a block, with the server that has the block."""
    async with provide_server():
        return await asyncio.to_thread(open_run_ledger, run)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, or write directly to a pipe or a device. Keep a link, and write the file it points to.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            write(path)
            return
        with replace_atomically(path) as partial:
            write(partial)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror or error}): name another file") from None


def _print_queries(outcomes: Iterable[Outcome]) -> None:
    """Print the queries of each execution under its number, with an excerpt of long texts."""
    for outcome in outcomes:
        if outcome.meta.queries.tree:
            print(f"\n{outcome.meta.index}:")
        for record in outcome.meta.queries.tree:
            for line in _format_query(record):
                print(line)


def _format_query(record: dict[str, Any]) -> Iterator[str]:
    usage = Usage(*(record[name] for name in ("calls", "prompt_tokens", "completion_tokens", "cost")))
    where = f"{record['kind']} at depth {record['depth']}, {escape_text(record['model'])}"
    called = describe_usage(usage, record.get("cached", 0))
    yield f"{where}, {record['seconds']:.1f} s, called {called}"
    yield from _format_text(record["prompt"], "? ")
    for number, turn in enumerate(record.get("trajectory", ()), 1):
        yield f"{INDENT}turn {number}"
        yield from _format_text(turn.get("reasoning") or "", f"{INDENT}# ")
        yield from _format_text(turn.get("code") or "", f"{INDENT}> ")
        yield from _format_text(turn.get("output") or "", f"{INDENT}| ")
    if record.get("error"):
        yield from _format_text(record["error"], "! ")
    for inner in record.get("queries", ()):
        for line in _format_query(inner):
            yield INDENT + line


def _format_text(text: str, mark: str) -> Iterator[str]:
    for line in make_excerpt(text).splitlines():
        yield f"{INDENT}{mark}{line}"
