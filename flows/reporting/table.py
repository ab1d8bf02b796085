"""Tables of outcomes for people: rows of text, and records for Prefect's UI."""

import itertools
import math
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure, Outcome
from ...tasks.ledger.run_record import ReportSpec
from .best_trials import compute_losses, is_score, read_scores
from .columns import (
    COLUMNS,
    INDEX,
    OUTCOME,
    OUTPUTS,
    VARIABLES,
    Columns,
    Key,
    Tables,
    get_values,
)
from .groups import list_hidden_fields

EXIT_NOTE = "ended by sys.exit before SUBMIT"  # the note of a result without fields
BEST_MARK, PARETO_MARK = MARKS = "best", "Pareto"  # notes of the best trial, and of the trials on a Pareto front
INFEASIBLE = "infeasible"  # the note of a trial that violates a constraint
NO_FEASIBLE_TRIAL = "no trial is feasible"
CELL = 40  # characters of a value that a cell shows
MAX_SHOWN_ROWS = 200  # rows of a table on a terminal, at a prompt or in a notebook; the ledger has all rows

Rank = tuple[int, float, int]  # sorts rows, the best first
Row = tuple[Rank, dict[Key, Any]]  # a row's rank, which ends with the execution's number, and its cells

# A field may be a list of a million numbers: `reprlib` formats only the part that fits a cell.
_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = CELL // 3 + 1
_brief.maxlevel = 4
_brief.maxstring = _brief.maxlong = _brief.maxother = CELL


class OutcomeTable:
    """A table of outcomes, which keeps of a long value only what a cell shows."""

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
        variables, fields = (get_values(outcome, source) for source in (VARIABLES, OUTPUTS))
        hidden = set[str]() if self._spec.repeats is None else list_hidden_fields([outcome], self._spec)
        self.columns.add(VARIABLES, variables)
        # Code often submits its variables beside its results. The table shows these values once.
        new = [name for name, value in fields.items() if name not in variables or not _are_same(variables[name], value)]
        self.columns.add(OUTPUTS, [name for name in new if name not in hidden])
        rank, note = rank_outcome(index, outcome, self._spec)
        cells: dict[Key, Any] = {column.key: column.get_value(outcome) for column in self._standard}
        cells |= {INDEX.key: index, OUTCOME.key: note}
        shown_variables, shown_fields = self.columns.types.values()
        cells |= {(VARIABLES, name): _shorten(value) for name, value in variables.items() if name in shown_variables}
        # A field that equals its variable here may differ from it in a later row.
        shown = shown_fields.keys() | shown_variables.keys()
        cells |= {(OUTPUTS, name): _shorten(value) for name, value in fields.items() if name in shown}
        self._rows.append((rank, cells))
        if self._max_rows is not None and len(self._rows) > 2 * self._max_rows:
            self._rows = self._sort_rows()

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
        columns = self.columns.name_all(self._tables if tables is None else tables, for_people=True)
        rows = [[name for name, _ in columns]]
        for cells in self._mark_cells(best):
            row: list[str] = []
            for _, column in columns:
                cell = cells.get(column.key)
                text = column.format.format(cell) if column.format and cell is not None else format_cell(cell)
                row.append("" if cell is None else text)
            rows.append(row)
        return rows

    def build_records(self, best: Collection[int], limit: int) -> list[dict[str, Any]]:
        """Return the first rows as dicts by column, at most `limit`, with numbers as numbers."""
        columns = self.columns.name_all(Tables.LEDGER)
        records: list[dict[str, Any]] = []
        for cells in itertools.islice(self._mark_cells(best), limit):
            record = {name: cells.get(column.key) for name, column in columns}
            seconds = record["seconds"] and round(record["seconds"], 3)
            records.append({**record, "seconds": seconds, "outcome": record["outcome"] or "succeeded"})
        return records

    def _mark_cells(self, best: Collection[int]) -> Iterator[dict[Key, Any]]:
        """Yield the cells of each row, with a mark on the best trials."""
        mark = PARETO_MARK if len(self._spec.objectives) > 1 else BEST_MARK
        for (_, _, index), cells in self._sort_rows():
            is_marked = index in best and not cells[OUTCOME.key]
            yield {**cells, OUTCOME.key: mark} if is_marked else cells


def _shorten(value: Any) -> bool | float | str:
    return format_cell(value) if isinstance(value, str) or not is_score(value) else value


def _are_same(variable: Any, field: Any) -> bool:
    return type(variable) is type(field) and (variable == field or (variable != variable and field != field))


def rank_outcome(index: int, outcome: Outcome, spec: ReportSpec) -> tuple[Rank, str]:
    """Return the rank of an outcome's row, and the note on it. Without objectives, executions keep their order."""
    has_objectives = bool(spec.objectives)
    if isinstance(outcome, Failure):
        return (3 if has_objectives else 0, 0.0, index), describe_error(outcome)
    exit_note = EXIT_NOTE if get_status(outcome) == "exited" else ""
    if not has_objectives:
        return (0, 0.0, index), exit_note
    if outcome.meta.pruned:
        return (1, 0.0, index), "pruned"
    scores = read_scores(outcome, spec)
    if scores is None:
        missing = "without all objectives as numbers"
        if spec.objective is not None:
            missing = f"no number as {format_cell(spec.objective)}"
        return (2, 1.0, index), exit_note or missing
    if not all(map(math.isfinite, scores)):
        return (2, 0.0, index), "diverged"
    loss = compute_losses(scores, spec)[0] if len(scores) == 1 else 0.0
    return ((0, loss, index), "") if spec.is_feasible(outcome.outputs) else ((1, loss, index), INFEASIBLE)


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
        text = value[: CELL + 1]
    else:
        text = f"{value:.6g}" if isinstance(value, float) else _brief.repr(value)
    return text if len(text) <= CELL else text[: CELL - 3] + "..."
