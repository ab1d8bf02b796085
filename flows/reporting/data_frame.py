"""Outcomes as pandas has them, where pandas is installed."""

from collections.abc import Sequence
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from .export import collect_columns


def build_data_frame(outcomes: Sequence[Outcome]) -> Any:
    """A pandas DataFrame with a row for each outcome, and the columns that an export to CSV has.

    They are its index, variables, fields, status, error, seconds and what else is known of each execution. Values are
    as they are: a column of integers, some of which are missing, has the dtype Int64. Raises ConfigurationError where
    pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ConfigurationError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas, or read the report's results"
        ) from None
    columns = collect_columns(iter(outcomes))
    series: dict[str, Any] = {}
    for name, column in columns.items():
        values = [column.get_value(outcome) for outcome in outcomes]
        # pandas itself would make floats of integers beside None or a float.
        dtypes = {"int": "Int64" if None in values else None, "json": object}
        series[name] = pandas.Series(values, dtype=dtypes.get(column.type))
    return pandas.DataFrame(series, columns=list(columns))
