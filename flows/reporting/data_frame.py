"""Outcomes as pandas has them, where pandas is installed."""

from collections.abc import Sequence
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from .export import collect_columns


def build_data_frame(outcomes: Sequence[Outcome]) -> Any:
    """A pandas DataFrame with a row for each outcome, and the columns that an export to CSV has.

    They are its index, variables, fields, status, error, seconds and what else is known of each execution; values are
    as they are. Raises ConfigurationError where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ConfigurationError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas, or read the report's results"
        ) from None
    columns = collect_columns(iter(outcomes))
    return pandas.DataFrame(
        {name: [column.get_value(outcome) for outcome in outcomes] for name, column in columns.items()},
        columns=list(columns),
    )
