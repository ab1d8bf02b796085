"""A run's outcomes as a table for other programs: CSV, Parquet with pyarrow, and a DataFrame with pandas.

A row is an execution, in order. A column is a variable, a submitted field, or another property of the execution. An
export to a file keeps only some rows in memory: it reads the ledger once for the columns and once for the rows.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import get_status
from ...sandbox.result import Failure, Outcome
from ...tasks.repeats import REPEAT
from .ledger_reader import LedgerReader
from .table import OUTPUTS, VARIABLES, get_values, name_columns

LIST, EMPTY = "list:", "empty"  # the beginning of a list's type, and the type of the items of an empty list
MAX_COLUMNS = 2000  # variables and fields together: code may make up any number of names
PARQUET_BATCH_ROWS = 5000
# Spreadsheets run text with these beginnings (OWASP, CSV injection). Some read the full-width characters too.
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its type, and a function that returns its values.

    The type is int, float, bool, text, `list:` before the type of the items, or json for all else.
    """

    type: str
    get_value: Callable[[Outcome], Any]


STANDARD_COLUMNS = {
    "index": Column("int", lambda outcome: outcome.meta.index),
    "status": Column("text", get_status),
    "error": Column("text", lambda outcome: type(outcome.error).__name__ if isinstance(outcome, Failure) else None),
    "message": Column("text", lambda outcome: str(outcome.error) if isinstance(outcome, Failure) else None),
    "seconds": Column("float", lambda outcome: float(outcome.meta.seconds)),
    "cpu_seconds": Column("float", lambda outcome: outcome.meta.cpu_seconds),
    "peak_mib": Column("float", lambda outcome: outcome.meta.peak_mib),
    "attempt": Column("int", lambda outcome: outcome.meta.attempt),
    "provider": Column("text", lambda outcome: outcome.meta.provider),
    "sandbox_id": Column("text", lambda outcome: outcome.meta.sandbox_id),
    "model_calls": Column("int", lambda outcome: outcome.meta.queries.calls),
    "model_tokens": Column("int", lambda o: o.meta.queries.prompt_tokens + o.meta.queries.completion_tokens),
    "model_cost": Column("float", lambda outcome: outcome.meta.queries.cost),
}

REPEAT_COLUMNS = {  # only in a run with repeats
    "group": Column("int", lambda outcome: outcome.meta.group),
    REPEAT: Column("int", lambda outcome: outcome.meta.repeat),
}


def write_csv(reader: LedgerReader, path: Path, *, raw: bool = False) -> None:
    """Write every outcome as CSV with a header: text as it is, all else as JSON. Raises OSError.

    Unless `raw`, the file is for spreadsheets: it begins with a byte order mark, without which Excel misreads UTF-8,
    and text that is like a formula gets an apostrophe in front.
    """
    format_text: Callable[[str], str] = str if raw else _disarm_formula

    def format_cell(value: Any) -> str:
        if value is None:
            return ""
        return format_text(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    columns = collect_columns(reader.read_outcomes())
    with path.open("w", encoding="utf-8" if raw else "utf-8-sig", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(map(format_text, columns))
        for outcome in reader.read_outcomes():
            writer.writerow([format_cell(column.get_value(outcome)) for column in columns.values()])


def _disarm_formula(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_BEGINNINGS) else text


def write_parquet(reader: LedgerReader, path: Path) -> None:
    """Write every outcome as Parquet: lists of one type as lists, other nested values as JSON.

    Raises OSError, and ConfigurationError if pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "writing Parquet needs pyarrow, which is not installed: pip install 'rlm-batch[parquet]', or use --csv"
        ) from None
    types = {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}

    def find_type(kind: str) -> Any:
        if kind.startswith(LIST):
            return pyarrow.list_(find_type(kind.removeprefix(LIST)))
        return types.get(kind, pyarrow.string())

    columns = collect_columns(reader.read_outcomes())
    schema = pyarrow.schema([(name, find_type(column.type)) for name, column in columns.items()])
    outcomes = reader.read_outcomes()
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while rows := list(itertools.islice(outcomes, PARQUET_BATCH_ROWS)):
            arrays = [
                pyarrow.array([_convert(column.get_value(row), column.type) for row in rows], field.type)
                for column, field in zip(columns.values(), schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _convert(value: Any, kind: str) -> Any:
    if value is None or kind in ("int", "bool"):
        return value
    if kind.startswith(LIST):
        return [_convert(item, kind.removeprefix(LIST)) for item in value]
    if kind == "json":
        return json.dumps(value, ensure_ascii=True)
    return value.encode("utf-8", "replace").decode("utf-8") if kind == "text" else float(value)


def build_data_frame(outcomes: Sequence[Outcome]) -> Any:
    """Return a pandas DataFrame with a row for each outcome, and the columns of an export to CSV.

    The values are not converted. A column of integers with missing values has the dtype Int64. Raises
    ConfigurationError if pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ConfigurationError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas, or read the report's results"
        ) from None
    columns = collect_columns(outcomes)
    series: dict[str, Any] = {}
    for name, column in columns.items():
        values = [column.get_value(outcome) for outcome in outcomes]
        # By default pandas makes floats of integers beside None or a float.
        is_nested = column.type == "json" or column.type.startswith(LIST)
        dtype = object if is_nested else "Int64" if column.type == "int" and None in values else None
        series[name] = pandas.Series(values, dtype=dtype)
    return pandas.DataFrame(series, columns=list(columns))


def collect_columns(outcomes: Iterable[Outcome]) -> dict[str, Column]:
    """Return the columns by name: the index, variables, fields, and the other standard columns.

    A variable or field whose name is taken gets its source as a prefix. Raises ConfigurationError if there are more
    than `MAX_COLUMNS` variables and fields.
    """
    types: dict[tuple[str, str], set[str]] = {}  # types of the values in a column, by its source and key
    has_groups = False
    for outcome in outcomes:
        has_groups = has_groups or outcome.meta.group is not None
        for source in (VARIABLES, OUTPUTS):
            for name, value in get_values(outcome, source).items():
                known_types = types.setdefault((source, name), set())
                if value is not None:
                    known_types.add(_name_type(value))
        if len(types) > MAX_COLUMNS:
            raise ConfigurationError(
                f"the executions have more than {MAX_COLUMNS:,} variables and fields, too many for a table: use --json"
            )
    variables, fields = ([name for source, name in types if source == wanted] for wanted in (VARIABLES, OUTPUTS))
    columns = {"index": STANDARD_COLUMNS["index"], **(REPEAT_COLUMNS if has_groups else {})}
    if has_groups:
        variables = [name for name in variables if name != REPEAT]
    for column_name, (source, name) in name_columns(variables, fields, {**columns, **STANDARD_COLUMNS}).items():
        columns[column_name] = Column(
            _merge_types(types[source, name]),
            lambda outcome, source=source, name=name: get_values(outcome, source).get(name),
        )
    return columns | STANDARD_COLUMNS


def _merge_types(types: set[str]) -> str:
    """Return one type for a column: json for mixed values, and for floats beside integers too large for a float."""
    if types and all(kind.startswith(LIST) for kind in types):
        items = {kind.removeprefix(LIST) for kind in types} - {EMPTY}
        merged = _merge_types(items) if items else "text"
        return "json" if merged == "json" else f"{LIST}{merged}"
    if types and types <= {"int", "long"}:
        return "int"
    if types <= {"int", "float"}:
        return "float"
    return next(iter(types)) if len(types) == 1 else "json"


def _name_type(value: Any) -> str:
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "json"
    if type(value) is int and abs(value) > 2**53:
        return "long"
    if isinstance(value, list):
        values: list[Any] = value
        items = {_name_type(item) for item in values if item is not None} or {EMPTY}
        items -= {"int"} if "long" in items else set()
        merged = next(iter(items)) if len(items) == 1 else _merge_types(items)
        return "json" if merged == "json" else f"{LIST}{merged}"
    return {bool: "bool", int: "int", float: "float", str: "text"}.get(type(value), "json")
