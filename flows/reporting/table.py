"""Tables of outcomes: a column for each variable and each submitted field, as lines of text or as HTML."""

import itertools
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text, render_html_table
from ...sandbox.result import Outcome, Result
from ...tasks.redrawn_lines import redraw_lines

VARIABLES, OUTPUTS = "variables", "outputs"  # sources of a column's values
USAGE_COLUMNS = ("CPU seconds", "peak MiB")
EXIT_NOTE = "ended by sys.exit before SUBMIT"  # the note of a result without fields
BEST_MARK, PARETO_MARK = "best", "Pareto"  # notes of the best trial, and of the trials on a Pareto front
INFEASIBLE = "infeasible"  # the note of a trial that violates a constraint
NO_FEASIBLE_TRIAL = "no trial is feasible"
CELL = 40  # characters of a value that a cell shows
MAX_SHOWN_ROWS = 100  # rows of a table in a notebook or at a prompt

FeasibilityTest = Callable[[Mapping[str, Any]], bool]  # takes the fields of a result

# A field may be a list of a million numbers: `reprlib` formats only the part that fits a cell.
_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = CELL // 3 + 1
_brief.maxlevel = 4
_brief.maxstring = _brief.maxlong = _brief.maxother = CELL


def accept_all(_fields: Mapping[str, Any]) -> bool:
    """Return True: without constraints, all trials are feasible."""
    return True


def name_columns(
    variables: Iterable[str], fields: Iterable[str], taken: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return each column's source and key by the column's name, variables first.

    A name that is taken gets its source as a prefix: if there is a variable `x`, the field `x` has the column
    `outputs.x`. `taken` are the names of further columns.
    """
    keys = [(source, name) for source, names in ((VARIABLES, variables), (OUTPUTS, fields)) for name in names]
    columns: dict[tuple[str, str], str] = {}
    used = set(taken)
    # Shorter names come first: the field `x` gets `outputs.x` even if code also submits a field of that name.
    for source, name in sorted(keys, key=lambda key: (key[0] == OUTPUTS, len(key[1]))):
        column = name
        while column in used:
            column = f"{source}.{column}"
        columns[source, name] = column
        used.add(column)
    return {columns[key]: key for key in keys}


def list_new_fields(outcome: Outcome) -> list[str]:
    """Return the names of the submitted fields, without fields that equal the variable of the same name.

    Code often submits its variables beside its results. A table shows these values once.
    """
    variables, fields = (get_values(outcome, source) for source in (VARIABLES, OUTPUTS))
    return [name for name, value in fields.items() if name not in variables or not _are_same(variables[name], value)]


def _are_same(variable: Any, field: Any) -> bool:
    return type(variable) is type(field) and (variable == field or (variable != variable and field != field))


def get_values(outcome: Outcome, source: str) -> dict[str, Any]:
    """Return the variables of an execution, or its submitted fields."""
    if source == VARIABLES:
        return outcome.meta.variables
    return outcome.outputs if isinstance(outcome, Result) else {}


def format_rows(
    outcomes: Sequence[Outcome],
    best: Sequence[Result] = (),
    limit: int | None = None,
    *,
    mark: str = BEST_MARK,
    shows_output: bool = False,
    hidden: Collection[str] = (),
    shows_usage: bool = False,
    is_feasible: FeasibilityTest = accept_all,
) -> list[list[str]]:
    """Return rows of text that is safe on a terminal, the header first: number, variables, fields, and a note.

    With a `limit`, return the first rows and the rows of `best`. The note of `best` is `mark`. `shows_output` adds a
    column with the last line that the code printed, if any code printed anything. `shows_usage` adds columns with the
    CPU seconds and the peak memory. Fields in `hidden` have no column. Results whose fields fail `is_feasible` have a
    note.
    """
    first = outcomes if limit is None else outcomes[:limit]
    # The ledger of a run that was interrupted lacks executions, so a position may differ from the execution's number.
    numbered: list[tuple[int, Outcome]] = [
        (position if outcome.meta.index is None else outcome.meta.index, outcome)
        for position, outcome in enumerate(first)
    ]
    best_numbers = {result.meta.index or 0: result for result in best}
    shown_numbers = {number for number, _ in numbered}
    numbered += [(number, result) for number, result in best_numbers.items() if number not in shown_numbers]
    shown = [outcome for _, outcome in numbered]
    variables = dict.fromkeys(name for outcome in shown for name in get_values(outcome, VARIABLES))
    fields = dict.fromkeys(name for outcome in shown for name in list_new_fields(outcome) if name not in hidden)
    output_columns = ["printed last"] if shows_output and any(outcome.meta.stdout.strip() for outcome in shown) else []
    usage_columns = USAGE_COLUMNS if shows_usage else ()
    columns = name_columns(variables, fields, [*output_columns, *usage_columns])
    rows = [["", *columns, *output_columns, *usage_columns, ""]]
    for number, outcome in numbered:
        cells = [format_cell(get_values(outcome, source).get(name, "")) for source, name in columns.values()]
        if output_columns:
            cells.append(format_cell("".join(redraw_lines(outcome.meta.stdout)[-1:])))
        if shows_usage:
            cells += format_usage(outcome.meta.cpu_seconds, outcome.meta.peak_mib)
        if isinstance(outcome, Result):
            note = "pruned" if outcome.meta.pruned else mark if number in best_numbers else describe_exit(outcome)
            if not note and not is_feasible(outcome.outputs):
                note = INFEASIBLE
        else:
            note = f"{type(outcome.error).__name__}: {outcome.error.summary}"
        rows.append([str(number), *cells, note])
    return [[escape_text(cell) for cell in row] for row in rows]


def format_usage(cpu_seconds: float | None, peak_mib: float | None) -> list[str]:
    """Return the cells of `USAGE_COLUMNS`, which are empty for unknown values."""
    return [
        "" if cpu_seconds is None else f"{cpu_seconds:.3g}",
        "" if peak_mib is None else f"{peak_mib:,.1f}",
    ]


def describe_exit(outcome: Outcome) -> str:
    """Return a note if the code called `sys.exit` before SUBMIT, otherwise an empty text."""
    return EXIT_NOTE if get_status(outcome) == "exited" else ""


def align_rows(rows: list[list[str]]) -> str:
    """Return the rows as lines, each cell as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def render_outcomes(
    outcomes: Sequence[Outcome],
    best: Sequence[Result] = (),
    mark: str = BEST_MARK,
    hidden: Collection[str] = (),
    is_feasible: FeasibilityTest = accept_all,
) -> str:
    """Return the first outcomes and the `best` as an HTML table, and how many more there are."""
    header, *rows = format_rows(outcomes, best, MAX_SHOWN_ROWS, mark=mark, hidden=hidden, is_feasible=is_feasible)
    rest = len(outcomes) - MAX_SHOWN_ROWS
    return render_html_table(header, rows) + (f"<p>{rest:,} more are in the report.</p>" if rest > 0 else "")


def format_variables(variables: Mapping[str, Any], limit: int | None = None) -> str:
    """Return the first `limit` variables, or all, in a line such as `lr=0.1, size=64`."""
    shown = itertools.islice(variables.items(), limit)
    return escape_text(", ".join(f"{name}={format_cell(value)}" for name, value in shown))


def format_cell(value: Any) -> str:
    """Return a value as a cell shows it: numbers to six digits, and at most `CELL` characters."""
    if isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = value[: CELL + 1] if isinstance(value, str) else _brief.repr(value)
    return text if len(text) <= CELL else text[: CELL - 3] + "..."
