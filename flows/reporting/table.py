"""Tables of outcomes for people: rows of text, and records for Prefect's UI."""

import itertools
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome
from ...tasks.ledger.run_record import ReportSpec
from .best_trials import compute_losses, is_score, read_scores
from .columns import COLUMNS, INDEX, OUTCOME, OUTPUTS, VARIABLES, Column, Columns, Key, Tables, get_values
from .groups import PASSED, list_hidden_fields

EXIT_NOTE = "ended by sys.exit before SUBMIT"  # the note of a result without fields
BEST_MARK, PARETO_MARK = MARKS = "best", "Pareto"  # notes of the best trial, and of the trials on a Pareto front
INFEASIBLE = "infeasible"  # the note of a trial that violates a constraint
NO_FEASIBLE_TRIAL = "no trial is feasible"
CELL = 40  # characters of a value that a cell shows
MAX_VARIABLES = 8  # variables that identify an execution in a line; also trials on a Pareto front
MAX_SHOWN_ROWS = 200  # rows of a table on a terminal, at a prompt or in a notebook; the ledger has all rows

Rank = tuple[int, float, int]  # sorts rows, the best first; it ends with the execution's number
Row = tuple[Rank, dict[Key, Any]]  # a row's rank and cells
# The first item of a rank, for tables with objectives.
FEASIBLE, UNRANKED, DIVERGED, WITHOUT_SCORE, FAILED = range(5)

# A field may be a list of a million numbers: `reprlib` formats only the part that fits a cell.
_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = CELL // 3 + 1
_brief.maxlevel = 4
_brief.maxstring = _brief.maxlong = _brief.maxother = CELL


class OutcomeTable:
    """A table of outcomes. It keeps only the part of a long value that a cell shows."""

    def __init__(
        self, spec: ReportSpec, tables: Tables, max_rows: int | None = None, max_columns: int | None = None
    ) -> None:
        """Begin an empty table.

        Args:
            spec: The objectives.
            tables: The tables whose columns can be shown.
            max_rows: The number of rows, of which the best come first. By default all are shown, in their order.
            max_columns: The number of variables, and also of fields, that have a column. Objectives always have one.
        """
        self.columns = Columns(max_columns, [item.name for item in spec.objectives])
        self._spec, self._tables, self._max_rows = spec, tables, max_rows
        self._standard = [column for column in COLUMNS if column.tables & tables]
        self._rows: list[Row] = []

    def add(self, index: int, outcome: Outcome) -> None:
        """Add a row for an execution with this number, or for a group of repeats."""
        variables, fields = outcome.meta.variables, get_values(outcome, OUTPUTS)
        self.columns.add(VARIABLES, variables)
        self.columns.add(OUTPUTS, self._list_new_fields(outcome))
        rank, note = rank_outcome(index, outcome, self._spec)
        cells: dict[Key, Any] = {column.key: column.get_value(outcome) for column in self._standard}
        cells |= {INDEX.key: index, OUTCOME.key: note}
        shown_variables, shown_fields = self.columns.types[VARIABLES], self.columns.types[OUTPUTS]
        for name, value in variables.items():
            if name in shown_variables:
                cells[VARIABLES, name] = _shorten(value)
        for name, value in fields.items():
            # A field that equals its variable in this row may differ from it in a later row, and get a column then.
            if name in shown_fields or name in shown_variables:
                cells[OUTPUTS, name] = _shorten(value)
        passed, samples = (fields.get(f"{PASSED}.{key}") for key in ("sum", "count"))
        if outcome.meta.group is not None and passed is not None and samples is not None:
            cells[OUTPUTS, PASSED] = _shorten(f"{passed} of {samples}")
        self._rows.append((rank, cells))
        if self._max_rows is not None and len(self._rows) > 2 * self._max_rows:
            self._rows = self._sort_rows()

    def _list_new_fields(self, outcome: Outcome) -> list[str]:
        """Return the fields that need a column. Hidden statistics, and fields that equal the variable, need none.

        Code often submits its variables beside its results. The table shows these values once.
        """
        variables, hidden = outcome.meta.variables, list_hidden_fields(outcome, self._spec)
        fields = get_values(outcome, OUTPUTS)
        new = [name for name, value in fields.items() if name not in variables or not _are_same(variables[name], value)]
        return [name for name in new if name not in hidden]

    def _sort_rows(self) -> list[Row]:
        if self._max_rows is None:
            return self._rows
        return sorted(self._rows, key=lambda row: row[0])[: self._max_rows]

    def build_rows(self, best: Collection[int], tables: Tables | None = None) -> list[list[str]]:
        """Return rows of text, the headings first: number, variables, fields, other columns, and a note.

        Args:
            best: The numbers of the best trials, which get a mark.
            tables: The tables whose columns are wanted. By default those of this table.
        """
        named = self.columns.name_all(self._tables if tables is None else tables, for_people=True)
        header = [name for name, _ in named]
        return [header, *(_format_row(cells, named) for cells in self._mark_cells(best))]

    def build_records(self, best: Collection[int], limit: int) -> list[dict[str, Any]]:
        """Return the first rows as dicts by column, at most `limit`, with numbers as numbers."""
        columns = self.columns.name_all(Tables.LEDGER)
        records: list[dict[str, Any]] = []
        for cells in itertools.islice(self._mark_cells(best), limit):
            record: dict[str, Any] = {name: cells.get(column.key) for name, column in columns}
            record["seconds"] = round(record["seconds"], 3)
            record["outcome"] = record["outcome"] or "succeeded"
            records.append(record)
        return records

    def _mark_cells(self, best: Collection[int]) -> Iterator[dict[Key, Any]]:
        """Yield the cells of each row, with a mark on the best trials."""
        mark = PARETO_MARK if len(self._spec.objectives) > 1 else BEST_MARK
        for (_, _, index), cells in self._sort_rows():
            is_marked = index in best and not cells[OUTCOME.key]
            yield {**cells, OUTCOME.key: mark} if is_marked else cells


def _format_row(cells: Mapping[Key, Any], columns: Iterable[tuple[str, Column]]) -> list[str]:
    row: list[str] = []
    for _, column in columns:
        cell = cells.get(column.key)
        if cell is None:
            row.append("")
        elif column.format:
            row.append(column.format.format(cell))
        else:
            row.append(format_cell(cell))
    return row


def _shorten(value: Any) -> bool | float | str:
    return value if is_score(value) else format_cell(value)


def _are_same(variable: Any, field: Any) -> bool:
    """Return whether two values have the same type and are equal, or are both NaN."""
    are_nan = variable != variable and field != field
    return type(variable) is type(field) and (variable == field or are_nan)


def rank_outcome(index: int, outcome: Outcome, spec: ReportSpec) -> tuple[Rank, str]:
    """Return the rank of an outcome's row, and the note on it. Without objectives, executions keep their order."""
    note = ""
    if isinstance(outcome, Failure):
        note = describe_error(outcome)
    elif get_status(outcome) == "exited":
        note = EXIT_NOTE
    if not spec.objectives:
        return (0, 0.0, index), note
    if isinstance(outcome, Failure):
        return (FAILED, 0.0, index), note
    if outcome.meta.pruned:
        return (UNRANKED, 0.0, index), "pruned"
    scores = read_scores(outcome, spec)
    if scores is None:
        missing = "without all objectives as numbers"
        if spec.objective is not None:
            missing = f"no number as {format_cell(spec.objective)}"
        return (WITHOUT_SCORE, 0.0, index), note or missing
    if not all(map(math.isfinite, scores)):
        return (DIVERGED, 0.0, index), "diverged"
    loss = compute_losses(scores, spec)[0] if len(scores) == 1 else 0.0
    if not spec.is_feasible(outcome.outputs):
        return (UNRANKED, loss, index), INFEASIBLE
    return (FEASIBLE, loss, index), ""


def describe_error(failure: Failure) -> str:
    """Return the type and the first line of a failure's error."""
    return f"{type(failure.error).__name__}: {failure.error.summary}"


def align_rows(rows: list[list[str]]) -> str:
    """Return the rows as lines, each cell as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def format_variables(variables: Mapping[str, Any], limit: int | None = None) -> str:
    """Return the first `limit` variables, or all, in a line such as `lr=0.1, size=64`."""
    shown = itertools.islice(variables.items(), limit)
    return escape_text(", ".join(f"{name}={format_cell(value)}" for name, value in shown))


def format_cell(value: Any) -> str:
    """Return a value as a cell shows it: numbers to six digits, and at most `CELL` characters."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = _brief.repr(value)
    return text if len(text) <= CELL else text[: CELL - 3] + "..."
