"""Outcomes as a table of text: what a report prints and the command line shows."""

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Outcome, Result
from ...tasks.redrawn_lines import redraw_lines
from .columns import VARIABLES, get_values, list_new_fields, name_columns

CELL = 40  # characters of a value that are shown
BEST_MARK, PARETO_MARK = "best", "Pareto"  # notes of the best trial, and of those on the front of several objectives

# What a cell has no room for is not written out first: a field may be a list of a million numbers.
_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = CELL // 3 + 1
_brief.maxlevel = 4
_brief.maxstring = _brief.maxlong = _brief.maxother = CELL


def format_rows(
    outcomes: Sequence[Outcome],
    best: Sequence[Result] = (),
    limit: int | None = None,
    *,
    mark: str = BEST_MARK,
    shows_output: bool = False,
) -> list[list[str]]:
    """Rows of text that a terminal can show, the header first: number, variables, fields, and what became of it.

    With a `limit` they are so many of the first, and the `best`, which have the note `mark`. With `shows_output` they
    have the last line that the code printed, where any did.
    """
    numbered = list(enumerate(outcomes if limit is None else outcomes[:limit]))
    best_numbers = {result.meta.index or 0 for result in best}
    numbered += [
        (result.meta.index or 0, result) for result in best if limit is not None and (result.meta.index or 0) >= limit
    ]
    outcomes = [outcome for _, outcome in numbered]
    variables = dict.fromkeys(name for outcome in outcomes for name in get_values(outcome, VARIABLES))
    fields = dict.fromkeys(name for outcome in outcomes for name in list_new_fields(outcome))
    shows_output = shows_output and any(outcome.meta.stdout.strip() for outcome in outcomes)
    more = ["printed last"] if shows_output else []
    columns = name_columns(variables, fields, more)
    rows = [["", *columns, *more, ""]]
    for number, outcome in numbered:
        values = [format_cell(get_values(outcome, source).get(name, "")) for source, name in columns.values()]
        if isinstance(outcome, Result):
            note = "pruned" if outcome.meta.pruned else mark if number in best_numbers else ""
        else:
            note = f"{type(outcome.error).__name__}: {outcome.error.summary}"
        if shows_output:
            values.append(format_cell("".join(redraw_lines(outcome.meta.stdout)[-1:])))
        rows.append([str(number), *values, note])
    return [[escape_text(cell) for cell in row] for row in rows]


def align_rows(rows: list[list[str]]) -> str:
    """Rows of text as lines, each cell as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def format_variables(variables: Mapping[str, Any], limit: int | None = None) -> str:
    """Names with their values in a line, as in `lr=0.1, size=64`; with a `limit` so many of the first."""
    shown = itertools.islice(variables.items(), limit)
    return escape_text(", ".join(f"{name}={format_cell(value)}" for name, value in shown))


def format_cell(value: Any) -> str:
    """A value as a cell shows it: numbers to six figures, and no more than `CELL` characters."""
    if isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = value[: CELL + 1] if isinstance(value, str) else _brief.repr(value)
    return text if len(text) <= CELL else text[: CELL - 3] + "..."
