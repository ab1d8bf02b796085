"""Tables of pandas, polars and pyarrow as rows of JSON values. None of these packages is imported here."""

import datetime
from typing import Any

from ..errors import ConfigurationError
from ..wire.strict_json import NotJsonError, convert_fields

MISSING_TYPES = ("NAType", "NaTType")  # the types of pandas.NA and pandas.NaT


def list_table_rows(name: str, value: Any) -> list[dict[Any, Any]] | None:
    """Return a dict for each row of a DataFrame or a table of pyarrow, or None for anything else.

    Raises ConfigurationError if two columns have one name, the index has a name, or JSON cannot hold a cell.
    """
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    if hasattr(kind, "to_pylist") and hasattr(kind, "schema"):  # a Table or a RecordBatch of pyarrow
        check_column_names(value.schema.names, name)
        return list_arrow_rows(value, name)
    if hasattr(kind, "to_dicts"):  # polars
        columns, read_rows = value.columns, value.to_dicts
        _check_polars_times(name, value)
    elif hasattr(kind, "to_dict") and hasattr(kind, "columns"):  # pandas, and packages with its methods
        columns, read_rows = list(value.columns), lambda: value.to_dict("records")
        if any(index is not None for index in value.index.names):
            raise ConfigurationError(
                f"{name} is a {kind.__name__} with the index {', '.join(map(str, value.index.names))}, which rows "
                f"would lose: use {name}.reset_index()"
            )
    else:
        return None
    check_column_names(columns, name)
    return [{column: _convert_cell(name, column, cell) for column, cell in row.items()} for row in read_rows()]


def check_column_names(names: list[str], table: object) -> None:
    """Raise ConfigurationError if two columns have one name, or a column is an index that pandas wrote."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{table} has two columns {name!r}: rename one of them")
        if str(name).startswith("__index_level_"):
            raise ConfigurationError(f"{table}: {name} is pandas' index: save without it, to_parquet(index=False)")


def list_arrow_rows(table: Any, name: object) -> list[dict[str, Any]]:
    """Return a dict for each row of a table of pyarrow. Raises ConfigurationError if JSON cannot hold a cell."""
    columns: list[list[Any]] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        metadata: dict[Any, Any] = field.metadata or {}
        extension = str(metadata.get(b"ARROW:extension:name", field.type))
        if "pandas." in extension:  # The numbers of a Period or an Interval alone would be wrong.
            raise ConfigurationError(f"column {field.name!r} of {name} is {extension}: cast it to text")
        try:
            column = column.cast("time64[us]") if str(field.type) == "time64[ns]" else column
            cells = column.to_pylist(maps_as_pydicts="strict")
        except (ValueError, TypeError, KeyError, OverflowError, NotImplementedError) as error:
            raise ConfigurationError(
                f"column {field.name!r} of {name} is {field.type}, which cannot become JSON: {error}. Cast it to a "
                "number or text, or leave it out"
            ) from None
        columns.append([_convert_cell(name, field.name, cell) for cell in cells])
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _check_polars_times(name: str, frame: Any) -> None:
    """Raise ConfigurationError for a column with times between microseconds, which `to_dicts` would cut off."""
    for column, kind in frame.schema.items():
        has_nanoseconds = str(kind) == "Time" or "Datetime(time_unit='ns'" in str(kind)
        if not has_nanoseconds:
            continue
        if kind.is_nested() or (frame[column].dt.nanosecond() % 1000 != 0).any():
            raise _refuse_nanoseconds(name, column)


def _refuse_nanoseconds(name: object, column: str) -> ConfigurationError:
    return ConfigurationError(
        f"column {column!r} of {name} has times with nanoseconds, which Python's datetime cannot hold: round them to "
        "microseconds, or cast them to text"
    )


def _convert_cell(name: object, column: Any, cell: Any) -> Any:
    """Return a cell as JSON. Missing cells and NaN become None, and dates and times become text in ISO 8601."""
    kind: Any = type(cell)  # type: ignore[reportUnknownVariableType]
    if cell is None or kind in (str, int, bool):
        return cell
    if kind.__name__ in MISSING_TYPES or (not hasattr(kind, "__len__") and cell != cell):  # NaN differs from itself.
        return None
    if isinstance(cell, (datetime.date, datetime.time)):
        if getattr(cell, "nanosecond", 0):  # A Timestamp of pandas has this attribute.
            raise _refuse_nanoseconds(name, column)
        return cell.isoformat()
    if kind.__name__ in ("ndarray", "datetime64") and cell.dtype.kind == "O":
        return _convert_cell(name, column, cell.tolist())
    if kind.__name__ in ("ndarray", "datetime64") and cell.dtype.kind == "M":  # times of numpy
        rounded = cell.astype("datetime64[us]")
        is_missing = cell != cell  # NaT differs from itself.
        if ((rounded != cell) & ~is_missing).any():
            raise _refuse_nanoseconds(name, column)
        return _convert_cell(name, column, rounded.tolist())
    if isinstance(cell, (list, tuple)):
        return [_convert_cell(name, column, item) for item in cell]  # type: ignore[reportUnknownVariableType]
    if isinstance(cell, dict) and all(isinstance(key, str) for key in cell):  # type: ignore[reportUnknownVariableType]
        return {key: _convert_cell(name, column, item) for key, item in cell.items()}  # type: ignore[reportUnknownVariableType]
    try:
        converted = convert_fields({"cell": cell}, allow_nonfinite=True)["cell"]
    except NotJsonError:
        raise ConfigurationError(
            f"column {column!r} of {name} has the type {kind.__name__}, which JSON cannot hold: cast it to a number or "
            "text, or leave it out"
        ) from None
    return _convert_cell(name, column, converted) if isinstance(converted, list) else converted
