"""The report on a run, from its ledger: on the terminal a table, and its queries as a tree; a page of HTML; exports."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..blocks.storage.location import Location, replace_atomically
from ..blocks.storage.location_parsing import is_remote, parse_location, parse_scheme
from ..flows.prefect_server import embedded_server
from ..flows.reporting.document import Verbatim
from ..flows.reporting.export import write_csv, write_parquet
from ..flows.reporting.html import render_html
from ..flows.reporting.ledger_reader import LedgerReader, open_run_ledger
from ..flows.reporting.report import build_report, build_summary_rows, build_table_rows, describe_cached, describe_usage
from ..flows.reporting.table import BEST_MARK, PARETO_MARK
from ..flows.reporting.trajectories import check_directory, write_trajectories
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.queries.budget import Usage
from ..sandbox.result import Outcome
from .outcome_output import OutputFormat, print_json_lines, print_outputs
from .table import print_table

INDENT = "  "  # of a query below that which asked it


def show_report(
    run: str,
    html: str | None,
    csv: str | None,
    parquet: str | None,
    atif: str | None,
    *,
    raw_csv: bool = False,
    shows_queries: bool = False,
    output: OutputFormat,
) -> int:
    """Prints the table, writes the page (by default `report.html` beside the results) and what else is asked for.

    As JSON, standard output has a line for each execution, in their order, and nothing else.
    """
    if raw_csv and csv is None:
        raise ConfigurationError("--raw-csv says how --csv is written: name the file with --csv")
    for option, file in (("--html", html), ("--csv", csv), ("--parquet", parquet)):
        if file == "":
            raise ConfigurationError(f"{option} names no file")
        if is_remote(file):
            raise ConfigurationError(
                f"{option} writes a file of this machine, and {file} is none: copy it there yourself"
            )
    trajectories = None if atif is None else _locate_trajectories(atif)
    reader = asyncio.run(_open_below_block(run)) if parse_scheme(run) == "block" else open_run_ledger(run)
    try:
        summary = reader.summarize()
    except (TypeError, KeyError, AttributeError) as error:  # lines that are JSON, and not what we write
        raise ConfigurationError(
            f"the ledger {reader.ledger.path} is damaged, and cannot be reported on: {error}"
        ) from None
    record = reader.records[-1]
    for name, value in build_summary_rows(summary, reader.records):
        print(f"{escape_text(name)}: {escape_text(value)}", file=sys.stderr)
    paths = sys.stderr if output.is_json else sys.stdout
    if output.is_json:
        print_json_lines(reader.read_outcomes(), summary.best_trials)
    else:
        rows = build_table_rows(summary)
        print_table(rows, len(rows) - 1, mark=PARETO_MARK if summary.spec.objectives else BEST_MARK)
        if output.shows_output:
            print_outputs(reader.read_outcomes())
        if shows_queries:
            _print_queries(reader.read_outcomes())
    name = record.name or record.flow
    page = parse_location(html) if html else reader.ledger.path / "report.html"
    folder = str(page).rpartition("/")[0] if isinstance(page, Location) else str(page.absolute().parent)
    text = render_html(build_report(summary, reader.records), name, folder).encode("utf-8", "replace")
    if isinstance(page, Location):
        try:
            page.write(text)
        except OSError as error:
            raise ConfigurationError(f"{page} cannot be written: {error.strerror}; name a file with --html") from None
    else:
        _write(page, lambda path: path.write_bytes(text))
    print(f"Report: {page}", file=paths)
    exports: list[tuple[str | None, str, Callable[[LedgerReader, Path], object]]] = [
        (csv, "CSV", partial(write_csv, raw=raw_csv)),
        (parquet, "Parquet", write_parquet),
    ]
    for file, kind, write in exports:
        if file:
            _write(Path(file).expanduser(), lambda path, write=write: write(reader, path))
            print(f"{kind}: {Path(file).expanduser().absolute()}", file=paths)
    if trajectories is not None:
        _write_trajectories(reader, trajectories)
        print(f"Trajectories: {trajectories}", file=paths)
    return 0


def _locate_trajectories(text: str) -> Path:
    """The directory for trajectories. Raises ConfigurationError where it is none, or has something in it."""
    if not text:
        raise ConfigurationError("--atif names no directory")
    if is_remote(text):
        raise ConfigurationError(
            f"--atif fills a directory of this machine, and {text} is none: copy it there yourself"
        )
    path = Path(text).expanduser().absolute()
    check_directory(path)
    return path


def _write_trajectories(reader: LedgerReader, directory: Path) -> None:
    try:
        write_trajectories(reader, directory)
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be written to: {error.strerror or error}; name another directory"
        ) from None
    except (TypeError, KeyError, AttributeError, ValueError) as error:  # records that are JSON, and not what we write
        raise ConfigurationError(
            f"the ledger {reader.ledger.path} is damaged, and its trajectories cannot be written: {error}"
        ) from None


async def _open_below_block(run: str) -> LedgerReader:
    """The ledger at a location of a block: the server that has the block is there meanwhile."""
    async with embedded_server():
        return await asyncio.to_thread(open_run_ledger, run)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes the file whole or not at all. Raises ConfigurationError where that cannot be done.

    What a link names is written, not the link; a pipe or a device is written to, and stays what it is.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            write(path)
            return
        with replace_atomically(path) as partial:
            write(partial)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}; name another file") from None


def _print_queries(outcomes: Iterable[Outcome]) -> None:
    """Prints the queries of each execution that asked any, under its number; of long texts as much as a page shows."""
    for outcome in outcomes:
        if outcome.meta.queries.tree:
            print(f"\n{outcome.meta.index}:")
        for record in outcome.meta.queries.tree:
            for line in _format_query(record):
                print(line)


def _format_query(record: dict[str, Any]) -> Iterator[str]:
    usage = Usage(*(record[name] for name in ("calls", "prompt_tokens", "completion_tokens", "cost")))
    where = f"{record['kind']} at depth {record['depth']}, {escape_text(record['model'])}"
    called = describe_usage(usage) + describe_cached(record.get("cached", 0))
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
    for line in Verbatim(text).excerpt.splitlines():
        yield f"{INDENT}{mark}{line}"
