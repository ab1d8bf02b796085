"""Tables of pandas, polars and pyarrow as rows of JSON values. None of these packages is imported here."""

import datetime
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.wire.strict_json import NotJsonError, convert_fields

MISSING_TYPES = ("NAType", "NaTType")  # the types of pandas.NA and pandas.NaT


def list_table_rows(name: str, value: Any) -> list[dict[Any, Any]] | None:
    """Return a dict for each row of a table, or None if the value is no table.

    Missing cells become None, and dates and times become text in ISO 8601.

    Args:
        name: The parameter that has the value.
        value: A DataFrame of pandas or polars, a table of pyarrow, or anything else.

    Raises:
        ConfigurationError: Two columns have one name, the index has a name, or JSON cannot hold a cell.
    """
    kind = type(value)
    if hasattr(kind, "to_pylist") and hasattr(kind, "schema"):  # a Table or a RecordBatch of pyarrow
        columns, read_rows = value.schema.names, value.to_pylist
    elif hasattr(kind, "to_dicts"):  # polars
        columns, read_rows = value.columns, value.to_dicts
    elif hasattr(kind, "to_dict") and hasattr(kind, "columns"):  # pandas, and packages with its methods
        columns, read_rows = list(value.columns), lambda: value.to_dict("records")
        if any(index is not None for index in value.index.names):
            raise ConfigurationError(
                f"{name} is a {kind.__name__} with the index {', '.join(map(str, value.index.names))}, which rows "
                f"would lose: use {name}.reset_index()"
            )
        if not all(isinstance(column, str) for column in columns):
            raise ConfigurationError(f"{name} has columns whose names are no text: use {name}.rename(columns=str)")
    elif hasattr(kind, "collect") and hasattr(kind, "collect_schema"):
        raise ConfigurationError(f"{name} is a {kind.__name__}, which has no rows yet: use {name}.collect()")
    else:
        return None
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{name} has two columns {twice!r}: rename one of them")
    return [{column: _convert_cell(name, column, cell) for column, cell in row.items()} for row in read_rows()]


def _convert_cell(name: str, column: Any, cell: Any) -> Any:
    kind = type(cell)
    if cell is None or kind in (str, int, bool):
        return cell
    if kind.__name__ in MISSING_TYPES or (not hasattr(kind, "__len__") and cell != cell):
        return None
    if isinstance(cell, (datetime.date, datetime.time)):
        return cell.isoformat()
    if isinstance(cell, (list, tuple)):
        return [_convert_cell(name, column, item) for item in cell]  # type: ignore[reportUnknownVariableType]
    if isinstance(cell, dict):
        return {key: _convert_cell(name, column, item) for key, item in cell.items()}  # type: ignore[reportUnknownVariableType]
    try:
        return convert_fields({"cell": cell}, allow_nonfinite=True)["cell"]
    except NotJsonError:
        raise ConfigurationError(
            f"column {column!r} of {name} has the type {kind.__name__}, which JSON cannot hold: cast it to a number or "
            "text, or leave it out"
        ) from None
