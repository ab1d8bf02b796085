"""The standard output of commands: tables, the text that code printed, or JSON for other programs."""

import codecs
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..flows.reporting.table import MARKS, MAX_SHOWN_ROWS
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_json, escape_text
from ..sandbox.result import Outcome
from .option_names import is_foreign, name_options

if TYPE_CHECKING:
    from rich.table import Table

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
ShowOutput = Annotated[Flag, Parameter(help="Print the code's whole output after the table")]
ShowUsage = Annotated[Flag, Parameter(help="Add columns with CPU seconds and peak memory to the table")]
Json = Annotated[Flag, Parameter(help="Print each row as a line of JSON instead of the table")]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of printed outcomes: JSON, or a table, to which the code's output and usage can be added."""

    shows_output: bool = False
    is_json: bool = False
    shows_usage: bool = False


def print_json(value: dict[str, Any]) -> None:
    """Print an object as a line of strict JSON, safe for terminals and for any output encoding."""
    is_unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "ascii").name.startswith("utf-8")
    print(escape_json(json.dumps(value, ensure_ascii=not is_unicode, allow_nan=False)))


def print_outputs(outcomes: Iterable[Outcome]) -> None:
    """Print the text that each execution's code printed, under the execution's number."""
    for outcome in outcomes:
        meta = outcome.meta
        for heading, text in ((f"{meta.index}:", meta.stdout), (f"{meta.index} standard error:", meta.stderr)):
            if text:
                print(f"\n{heading}")
                print(escape_text(text.rstrip("\n"), keep=LINE_CHARACTERS))


def print_whole_lines(table: "Table") -> None:
    """Print a table on standard output, as wide as the terminal, or without wrapping if it is not a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table, highlight=False, markup=False)


def print_table(rows: list[list[str]], total: int) -> None:
    """Print the first `MAX_SHOWN_ROWS` rows of text on standard output, and all rows of the best trials.

    Args:
        rows: The header, and then the rows. The last cell of a row is a message, or the mark of a best trial.
        total: The number of rows, of which `rows` may have only the first.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    header, *body = rows
    for name in header:
        table.add_column(escape_text(name), overflow="fold")
    for number, (*cells, message) in enumerate(body):
        is_best = message in MARKS
        if is_best or number < MAX_SHOWN_ROWS:
            if not is_foreign(message):
                message = name_options(message)
            texts = [escape_text(text) for text in [*cells, message]]
            table.add_row(*texts, style="bold green" if is_best else None)
    print_whole_lines(table)
    if total > MAX_SHOWN_ROWS:
        print(f"... and {total - MAX_SHOWN_ROWS} more, in the ledger", file=sys.stderr)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as 2 files."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def confirm(question: str, refusal: str) -> None:
    """Ask the person at the terminal a question, and return if the answer is yes.

    Raises:
        ConfigurationError: The answer is no. Without a terminal, the error has the text `refusal`.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(refusal)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigurationError("nothing was changed")
