"""A table on standard output, with the row of the best trial standing out."""

import sys

from rich.console import Console
from rich.table import Table

from ..sandbox.outcomes.text_escape import escape_text

MAX_TABLE_ROWS = 200  # Rows that are printed. The ledger has all.


def print_whole_lines(table: Table) -> None:
    """Print a table on standard output, as wide as the terminal, or without wrapping if it is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table, highlight=False, markup=False)


def print_table(rows: list[list[str]], total: int, mark: str = "") -> None:
    """Print rows of text on standard output, the header first. Highlight the rows whose last cell is `mark`.

    At most `MAX_TABLE_ROWS` of the `total` rows are printed, and the marked ones in any case.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(escape_text(name), overflow="fold")
    for number, row in enumerate(rows[1:]):
        is_marked = bool(mark) and row[-1] == mark
        if is_marked or number < MAX_TABLE_ROWS:
            table.add_row(*map(escape_text, row), style="bold green" if is_marked else None)
    print_whole_lines(table)
    if total > MAX_TABLE_ROWS:
        print(f"... and {total - MAX_TABLE_ROWS} more, in the ledger", file=sys.stderr)
