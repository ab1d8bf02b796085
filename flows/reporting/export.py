"""A run's outcomes as a table for other programs: CSV, and Parquet where pyarrow is installed.

A row is an execution, in their order; a column is a variable, a field that code submitted, or what is known of the
execution. Only a row (for Parquet, some thousands) is in memory at a time: the ledger is read once for the columns and
once for the rows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Failure, Outcome, Result
from .ledger_reader import LedgerReader

MAX_COLUMNS = 2000  # variables and fields together: the names are the code's, which may make up as many as it likes
PARQUET_BATCH_ROWS = 5000

# What is known of every execution, beside its variables and fields.
STANDARD_COLUMNS: dict[str, tuple[str, Callable[[Outcome], Any]]] = {
    "index": ("int", lambda outcome: outcome.meta.index),
    "status": ("text", lambda outcome: "succeeded" if isinstance(outcome, Result) else "failed"),
    "error": ("text", lambda outcome: type(outcome.error).__name__ if isinstance(outcome, Failure) else None),
    "message": ("text", lambda outcome: str(outcome.error) if isinstance(outcome, Failure) else None),
    "seconds": ("float", lambda outcome: float(outcome.meta.seconds)),
    "attempt": ("int", lambda outcome: outcome.meta.attempt),
    "provider": ("text", lambda outcome: outcome.meta.provider),
    "sandbox_id": ("text", lambda outcome: outcome.meta.sandbox_id),
    "model_calls": ("int", lambda outcome: outcome.meta.queries.calls),
    "model_tokens": ("int", lambda o: o.meta.queries.prompt_tokens + o.meta.queries.completion_tokens),
    "model_cost": ("float", lambda outcome: outcome.meta.queries.cost),
}


@dataclass(slots=True)
class Column:
    """A variable or a field, under the name that its column has, and the types of JSON that were found in it."""

    source: str  # variables or outputs
    name: str
    types: set[str] = field(default_factory=set[str])

    def value(self, outcome: Outcome) -> Any:
        """The outcome's value in this column; None where it has none."""
        if self.source == "variables":
            return outcome.meta.variables.get(self.name)
        return outcome.outputs.get(self.name) if isinstance(outcome, Result) else None

    @property
    def type(self) -> str:
        """One type for all of the column: what is neither number nor text nor bool is JSON, as text."""
        if self.types <= {"int", "float"}:
            return "int" if self.types == {"int"} else "float"
        return next(iter(self.types)) if len(self.types) == 1 else "json"


def write_csv(reader: LedgerReader, path: Path) -> None:
    """Writes every outcome as CSV with a header: text as it is, all else as JSON. Raises OSError."""
    columns = collect_columns(reader.read_outcomes())
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", *columns, *list(STANDARD_COLUMNS)[1:]])
        for outcome in reader.read_outcomes():
            known = [_format_csv_cell(get(outcome)) for _, get in STANDARD_COLUMNS.values()]
            writer.writerow(
                [known[0], *(_format_csv_cell(column.value(outcome)) for column in columns.values()), *known[1:]]
            )


def write_parquet(reader: LedgerReader, path: Path) -> None:
    """Writes every outcome as Parquet. Raises OSError, and ConfigurationError where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "Parquet is written by pyarrow, which is not installed: pip install 'rlm-batch[parquet]', or use --csv"
        ) from None
    columns = collect_columns(reader.read_outcomes())
    kinds = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "text": pyarrow.string(),
        "json": pyarrow.string(),
    }
    types = {"index": "int"} | {name: column.type for name, column in columns.items()}
    types |= {name: kind for name, (kind, _) in STANDARD_COLUMNS.items()}
    getters: dict[str, Callable[[Outcome], Any]] = {name: column.value for name, column in columns.items()}
    getters |= {name: get for name, (_, get) in STANDARD_COLUMNS.items()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in types.items()])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for rows in _batch_outcomes(reader.read_outcomes()):
            arrays = [
                pyarrow.array([_convert(getters[name](row), kind) for row in rows], kinds[kind])
                for name, kind in types.items()
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def collect_columns(outcomes: Iterator[Outcome]) -> dict[str, Column]:
    """The columns by name, variables first. A name that is taken gets its source as a prefix.

    Raises ConfigurationError where there are more than `MAX_COLUMNS`.
    """
    by_source: dict[tuple[str, str], Column] = {}
    for outcome in outcomes:
        fields = outcome.outputs if isinstance(outcome, Result) else {}
        for source, values in (("variables", outcome.meta.variables), ("outputs", fields)):
            for name, value in values.items():
                column = by_source.get((source, name))
                if column is None:
                    column = by_source[source, name] = Column(source, name)
                    if len(by_source) > MAX_COLUMNS:
                        raise ConfigurationError(
                            f"the executions have more than {MAX_COLUMNS} variables and fields, which is no table: "
                            "read the ledger's lines of JSON"
                        )
                if value is not None:
                    column.types.add(_name_type(value))
    columns: dict[str, Column] = {}
    for column in sorted(by_source.values(), key=lambda column: column.source != "variables"):
        name = column.name
        while name in STANDARD_COLUMNS or name in columns:
            name = f"{column.source}.{name}"
        columns[name] = column
    return columns


def _batch_outcomes(outcomes: Iterator[Outcome]) -> Iterator[list[Outcome]]:
    rows: list[Outcome] = []
    for outcome in outcomes:
        rows.append(outcome)
        if len(rows) == PARQUET_BATCH_ROWS:
            yield rows
            rows = []
    yield rows


def _name_type(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int" if -(2**63) <= value < 2**63 else "json"
        case float():
            return "float"
        case str():
            return "text"
        case _:
            return "json"


def _convert(value: Any, kind: str) -> Any:
    if value is None:
        return None
    match kind:
        case "json":
            return json.dumps(value, ensure_ascii=True)
        case "text":
            return value.encode("utf-8", "replace").decode("utf-8")
        case "float":
            return float(value)
        case _:
            return value


def _format_csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
