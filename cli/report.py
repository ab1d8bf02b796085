"""The report on a run, from its ledger: a table on the terminal, a page of HTML, and exports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..flows.export import write_csv, write_parquet
from ..flows.page import as_html
from ..flows.past import Past, past
from ..flows.report import report, summary, table
from ..sandbox.errors import ConfigurationError
from ..sandbox.shown import shown
from .display import show_table


def show_report(run: str, html: str | None, csv: str | None, parquet: str | None) -> int:
    """Prints the table, writes the page (by default `report.html` beside the results) and what else is asked for."""
    for option, file in (("--html", html), ("--csv", csv), ("--parquet", parquet)):
        if file == "":
            raise ConfigurationError(f"{option} names no file")
    found = past(run)
    try:
        tally = found.tally()
    except (TypeError, KeyError, AttributeError) as error:  # lines that are JSON, and not what we write
        raise ConfigurationError(f"the ledger {found.path} is damaged, and cannot be reported on: {error}") from None
    record = found.records[-1]
    for name, value in summary(tally, found.records):
        print(f"{shown(name)}: {shown(value)}", file=sys.stderr)
    rows = table(tally)
    show_table(rows, len(rows) - 1, mark="best")
    page = Path(html).expanduser() if html else found.path / "report.html"
    name = record.name or record.flow
    _write(page, lambda path: path.write_text(as_html(report(tally, found.records), name), "utf-8", "replace"))
    print(f"Report: {page.absolute()}")
    exports: list[tuple[str | None, str, Callable[[Past, Path], object]]] = [
        (csv, "CSV", write_csv),
        (parquet, "Parquet", write_parquet),
    ]
    for file, kind, write in exports:
        if file:
            _write(Path(file).expanduser(), lambda path, write=write: write(found, path))
            print(f"{kind}: {Path(file).expanduser().absolute()}")
    return 0


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes the file whole or not at all. Raises ConfigurationError where that cannot be done.

    What a link names is written, not the link; a pipe or a device is written to, and stays what it is.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    try:
        if path.exists() and not path.is_file():
            write(path)
            return
        try:
            write(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}; name another file") from None
