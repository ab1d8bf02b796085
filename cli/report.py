"""The command `report`: shows a run as a table and as a page of HTML, exports its rows, or compares two runs."""

import json as json_module
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..blocks.storage.location import Location, PathOrLocation, replace_atomically
from ..flows.reporting.comparison import Comparison, compare_runs
from ..flows.reporting.conversations import write_conversations
from ..flows.reporting.document import clean_line, make_excerpt, render_html
from ..flows.reporting.export import write_csv, write_csv_rows, write_parquet
from ..flows.reporting.ledger_reader import LedgerReader, find_last_run
from ..flows.reporting.report import ReportContent, build_report, build_summary_rows
from ..flows.reporting.table import EXIT_NOTE
from ..flows.reporting.turns import MORE, ShownQueries, TurnsReader
from ..flows.reports import describe_outcome, get_row_number
from ..flows.search.importances import compute_importances
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.outcome_json import get_status
from ..sandbox.outcomes.text_escape import escape_json, escape_text
from ..sandbox.result import Failure, Outcome
from .earlier_run import open_run
from .option_names import describe_error
from .output import Flag, Json, OutputFormat, ShowOutput, ShowUsage, print_json, print_outputs, print_table

Export = tuple[str | None, str, Callable[[Path], object]]  # a file's name, its kind, and a function that writes it
OutputFile = Annotated[str | None, Parameter(metavar="FILE")]
INDENT = "  "  # indents a query below the query that asked it
# The marks of a turn's lines. Prompts have "? ", answers "= ", and errors "! ".
MARKS = {"summary": "~ ", "thoughts": "~ ", "model": "# ", "code": "> ", "output": "| "}


def report(
    *runs: Annotated[str, Parameter(metavar="RUN")],
    html: OutputFile = None,
    csv: OutputFile = None,
    by: Annotated[list[str] | None, Parameter(metavar="NAME", negative=())] = None,
    execution: Annotated[int | None, Parameter(metavar="N")] = None,
    raw_csv: Flag = False,
    parquet: OutputFile = None,
    messages: OutputFile = None,
    show_output: ShowOutput = False,
    show_queries: Flag = False,
    usage: ShowUsage = False,
    json: Json = False,
) -> int:
    """Print a run's table and write its HTML report, or compare two runs.

    Args:
        runs: Id or name of a flow run (its first characters are enough), or the path of its results; by default the
            last run. A running one is reported up to now. Two runs are compared.
        html: HTML file; by default report.html next to the results
        csv: CSV file with a row for each execution. Text that a spreadsheet would run as a formula gets a leading
            apostrophe.
        by: Variable whose values name an input (repeatable). Each row is then an input with all its samples, and two
            runs are joined by their inputs.
        execution: Print all of one execution instead: variables, fields or error, output, and the turns and queries of
            language models
        raw_csv: Write text to the CSV file unchanged, for programs other than spreadsheets
        parquet: Parquet file with the rows of the CSV file; needs pyarrow
        messages: File with a line of JSON for each conversation with a language model, as chat messages. The run needs
            --record full.
        show_queries: Print the code's queries to language models after the table, with the turns of recursive ones
    """
    output = OutputFormat(show_output, json, usage)
    if raw_csv and csv is None:
        raise ConfigurationError("--raw-csv needs --csv: name the file with --csv")
    if len(runs) > 1:
        has_flags = show_output or show_queries or usage
        has_others = has_flags or any(option is not None for option in (execution, parquet, messages))
        if len(runs) > 2 or has_others:
            raise ConfigurationError(
                "report compares two runs, and then takes only --by, --csv, --html, --json and --raw-csv: name one run "
                "for the rest"
            )
        readers = [replace(open_run(run), by=by) for run in runs]
        comparison = compare_runs(*readers)
        content = _show_comparison(readers, comparison, is_json=json)
        exports: list[Export] = [
            (html, "Report", lambda path: path.write_text(render_html(content), "utf-8", "replace")),
            (csv, "CSV", partial(write_csv_rows, comparison.list_values(), raw=raw_csv)),
        ]
        _write_files(exports, is_json=json)
        return 0
    if not runs:
        last = find_last_run()
        print(f"Run: {escape_text(last.name)}, the last one", file=sys.stderr)
        runs = (last.results_path,)
    reader = replace(open_run(runs[0]), by=by)
    if execution is not None:
        _show_execution(reader, execution, is_json=json)
        return 0
    page = reader.ledger.path / "report.html" if html is None else Path(html).expanduser().absolute()
    _show_report(reader, page, output, shows_queries=show_queries)
    exports = [
        (csv, "CSV", partial(write_csv, reader, raw=raw_csv)),
        (parquet, "Parquet", partial(write_parquet, reader)),
        (messages, "Messages", partial(write_conversations, reader)),
    ]
    _write_files(exports, is_json=json)
    return 0


def _write_files(exports: Sequence[Export], *, is_json: bool) -> None:
    """Write the files that have a name, and print their paths."""
    for file, kind, write in exports:
        if file is not None:
            path = Path(file).expanduser().absolute()
            _write(path, write)
            print(f"{kind}: {path}", file=sys.stderr if is_json else sys.stdout)


def _show_report(reader: LedgerReader, page: PathOrLocation, output: OutputFormat, *, shows_queries: bool) -> None:
    """Print a run's table, and write its page.

    With JSON, standard output has only a line for each row, in order.
    """
    summary = reader.summarize()
    importances = compute_importances(summary)
    for name, value in build_summary_rows(summary, reader.records, importances):
        print(f"{escape_text(name)}: {escape_text(value)}", file=sys.stderr)
    if output.is_json:
        best_numbers = summary.best.numbers
        for outcome in reader.read_rows():
            print_json(describe_outcome(outcome, is_best=get_row_number(outcome) in best_numbers))
        if summary.reduction is not None:
            print_json(describe_outcome(summary.reduction))
    else:
        rows = summary.build_rows(shows_usage=output.shows_usage)
        print_table(rows, len(rows) - 1)
        if output.shows_output:
            print_outputs(reader.read_outcomes(with_reduction=True))
        if shows_queries:
            _print_queries(reader, reader.read_outcomes(with_reduction=True))
    folder = str(page).rpartition("/")[0]
    results = reader.ledger.path
    files = results / "files" if isinstance(results, Path) and str(results) != folder else None
    turns = TurnsReader(reader) if summary.asked else None
    text = render_html(build_report(summary, reader.records, importances), folder, files, turns)
    _write(page, lambda path: path.write_text(text, "utf-8", "replace"))
    print(f"Report: {page}", file=sys.stderr if output.is_json else sys.stdout)


def _print_queries(reader: LedgerReader, outcomes: Iterable[Outcome]) -> None:
    """Print the turns and queries of each execution."""
    turns_reader = TurnsReader(reader)
    for outcome in outcomes:
        if outcome.meta.queries.tree:
            execution = turns_reader.read_execution(outcome)
            print("", *_format_queries(ShownQueries([execution], 0)), sep="\n")
    if turns_reader.note:
        print(f"\n{turns_reader.note}")


def _show_comparison(readers: Sequence[LedgerReader], comparison: Comparison, *, is_json: bool) -> ReportContent:
    """Print how two runs differ, as a table or as a line of JSON for each pair. Return the content of a page."""
    figures: list[list[str]] = []
    for letter, reader in zip("AB", readers, strict=True):
        record = reader.records[-1]
        name = record.name or str(reader.ledger.path)
        figures.append([letter, f"{name}, {reader.summarize().describe(record.total)}"])
    figures += comparison.describe()
    for name, text in figures:
        print(escape_text(f"{name}: {text}"), file=sys.stderr)
    rows = comparison.list_rows()
    if is_json:
        for pair in comparison.pairs:
            print_json(comparison.to_json(pair))
    else:
        print_table(rows, len(comparison.pairs))
    omitted = len(comparison.pairs) + 1 - len(rows)
    notes = [f"--csv writes {omitted:,} more pairs."] if omitted else []
    return ReportContent("Comparison of A and B", "pair", figures, "Pairs", rows, notes)


def _show_execution(reader: LedgerReader, number: int, *, is_json: bool) -> None:
    """Print all of one execution: variables, fields or the error, the text that the code printed, and its queries."""
    outcome = reader.find_outcome(number)
    if is_json:
        print_json(describe_outcome(outcome))
        return
    meta, status = outcome.meta, get_status(outcome)
    if status == "exited":
        status = EXIT_NOTE
    where = f"{escape_text(meta.provider)} {meta.isolation}".rstrip()
    print(f"execution {meta.index} {status}, {meta.seconds:.3g} s, in {where}")
    if isinstance(outcome, Failure):
        _print_values(meta.variables)
        print(f"\n{type(outcome.error).__name__}: {describe_error(outcome.error)}")
    else:
        _print_values({**meta.variables, **outcome.outputs})
    for text in meta.earlier_errors:
        print(f"earlier attempt: {escape_text(text)}")
    if meta.judged is not None:
        print("\nThe check judged:")
        _print_values(meta.judged.get("outputs", {}), INDENT)
        if not meta.judged.get("submitted"):
            print(f"{INDENT}nothing submitted")
        error = meta.judged.get("error") or ""  # Earlier versions wrote the error's text.
        error_text = error["text"] if isinstance(error, dict) else error
        for name, text in (("error", error_text), ("the check printed", meta.judged.get("check_stdout") or "")):
            for line in _format_text(text, f"{name}: "):
                print(line)
    print_outputs([outcome])
    _print_queries(reader, [outcome])


def _print_values(values: dict[str, Any], indent: str = "") -> None:
    for name, value in values.items():
        print(f"{indent}{escape_text(name)} = {escape_json(json_module.dumps(value, ensure_ascii=False))}")


def _write(target: PathOrLocation, write: Callable[[Path], object]) -> None:
    """Write a file atomically, but a pipe or a device directly. For a symbolic link, write the file it points to.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        if isinstance(target, Location):
            with tempfile.NamedTemporaryFile() as file:
                write(Path(file.name))
                target.upload(Path(file.name))
        elif target.exists() and not target.is_file():
            write(target)
        else:
            with replace_atomically(target.resolve()) as partial_file:
                write(partial_file)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written ({error.strerror or error}): name another file") from None


def _format_queries(queries: ShownQueries) -> Iterator[str]:
    """Yield the lines about queries: the prompt, the turns, each with the queries of its code, and the answer."""
    for query in queries.shown:
        number = f"{query.number}. " if query.number else ""
        yield f"{number}{clean_line(query.title)}: {query.figures}"
        yield from _format_text(query.prompt, "? ")
        for turn in query.turns:
            yield f"{INDENT}turn {turn.number}{', failed' if turn.has_failed else ''}: {turn.figures}"
            for name, text in turn.texts:
                yield from _format_text(text, INDENT + MARKS[name])
            yield from (f"{INDENT * 2}{line}" for line in _format_queries(turn.queries))
        yield from (f"{INDENT}{line}" for line in _format_queries(query.others))
        yield from _format_text(query.answer, "= ")
        yield from _format_text(query.error, "! ")
    if queries.omitted_count:
        yield f"{queries.omitted_count:,} {MORE}"


def _format_text(text: str, mark: str) -> Iterator[str]:
    for line in make_excerpt(text).splitlines():
        yield f"{INDENT}{mark}{line}"
