"""A run's outcomes as a table for other programs: CSV, Parquet with pyarrow, and a DataFrame with pandas.

A row is an execution, or an input with all its samples, in order. A column is a variable, a submitted field, or another
property. An export to a file keeps only some rows in memory: it reads the ledger once for the columns and once for the
rows.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from ...tasks.repeats import REPEAT
from ..inputs.parquet import import_pyarrow
from .columns import LIST, OUTPUTS, VARIABLES, Column, Columns, Tables
from .ledger_reader import LedgerReader

MAX_COLUMNS = 2000  # variables and fields together: code may make up any number of names
PARQUET_BATCH_ROWS = 5000
# Spreadsheets run text with these beginnings (OWASP, CSV injection). Some read the full-width characters too.
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")


def write_csv(reader: LedgerReader, path: Path, *, raw: bool = False) -> None:
    """Write every row as CSV with a header: text as it is, other values as JSON. Raises OSError.

    Unless `raw`, the file is for spreadsheets: it begins with a byte order mark, without which Excel misreads UTF-8,
    and text that is like a formula gets an apostrophe in front.
    """
    columns = collect_columns(reader.read_rows())
    rows = ([column.get_value(outcome) for _, column in columns] for outcome in reader.read_rows())
    write_csv_rows(itertools.chain([[name for name, _ in columns]], rows), path, raw=raw)


def write_csv_rows(rows: Iterable[list[Any]], path: Path, *, raw: bool) -> None:
    """Write rows of values as CSV, the header first, as `write_csv` does. Raises OSError."""
    encoding = "utf-8" if raw else "utf-8-sig"
    with path.open("w", encoding=encoding, errors="replace", newline="") as file:
        writer = csv.writer(file)
        for row in rows:
            writer.writerow([_format_csv(value, raw=raw) for value in row])


def _format_csv(value: Any, *, raw: bool) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    is_formula = value.startswith(FORMULA_BEGINNINGS)
    return f"'{value}" if is_formula and not raw else value


def write_parquet(reader: LedgerReader, path: Path) -> None:
    """Write every row as Parquet: lists of one type as lists, other nested values as JSON.

    Raises:
        ConfigurationError: pyarrow is not installed.
        OSError: The file cannot be written.
    """
    pyarrow = import_pyarrow("writing Parquet")
    types = {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}

    def find_type(kind: str) -> Any:
        if kind.startswith(LIST):
            return pyarrow.list_(find_type(kind.removeprefix(LIST)))
        return types.get(kind, pyarrow.string())

    columns = collect_columns(reader.read_rows())
    schema = pyarrow.schema([(name, find_type(column.type)) for name, column in columns])
    outcomes = reader.read_rows()
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while rows := list(itertools.islice(outcomes, PARQUET_BATCH_ROWS)):
            arrays = [
                pyarrow.array([_convert(column.get_value(row), column.type) for row in rows], field.type)
                for (_, column), field in zip(columns, schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _convert(value: Any, kind: str) -> Any:
    """Return a value as pyarrow takes it for a column of this type."""
    if value is None or kind in ("int", "bool"):
        return value
    if kind.startswith(LIST):
        return [_convert(item, kind.removeprefix(LIST)) for item in value]
    if kind == "json":
        return json.dumps(value, ensure_ascii=True)
    if kind == "text":
        return value.encode("utf-8", "replace").decode("utf-8")  # Parquet takes no half of a surrogate pair.
    return float(value)


def build_data_frame(outcomes: Sequence[Outcome]) -> Any:
    """Return a pandas DataFrame with a row for each outcome, and the columns of an export to CSV.

    The values are not converted. A column of integers with missing values has the dtype Int64.

    Raises:
        ConfigurationError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ConfigurationError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas, or read the report's results"
        ) from None
    columns = collect_columns(outcomes)
    series: dict[str, Any] = {}
    for name, column in columns:
        values = [column.get_value(outcome) for outcome in outcomes]
        # By default pandas makes floats of integers beside None or a float.
        dtype: Any = None
        if column.type == "json" or column.type.startswith(LIST):
            dtype = object
        elif column.type == "int" and None in values:
            dtype = "Int64"
        series[name] = pandas.Series(values, dtype=dtype)
    return pandas.DataFrame(series)


def collect_columns(outcomes: Iterable[Outcome]) -> list[tuple[str, Column]]:
    """Return the columns of an export with their names.

    Raises ConfigurationError if there are more than `MAX_COLUMNS` variables and fields.
    """
    columns = Columns()
    has_repeats = False
    tables = Tables.EXPORT
    for outcome in outcomes:
        if outcome.meta.pruned:
            tables |= Tables.PRUNED
        if outcome.meta.repeat is not None:
            has_repeats = True
        columns.add_types(outcome)
        if len(columns.types[VARIABLES]) + len(columns.types[OUTPUTS]) > MAX_COLUMNS:
            raise ConfigurationError(
                f"the executions have more than {MAX_COLUMNS:,} variables and fields, too many for a table: use --json"
            )
    if not has_repeats:
        return columns.name_all(tables)
    columns.types[VARIABLES].pop(REPEAT, None)  # The repeat has a separate column.
    return columns.name_all(tables | Tables.REPEATS)
