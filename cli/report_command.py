"""The options of the command `report`."""

from typing import Annotated

from cyclopts import Parameter

from ..sandbox.errors import ConfigurationError
from .output import Flag, Json, OutputFormat, ShowOutput, ShowUsage
from .report import find_last_path, show_comparison, show_execution, show_report

OutputFile = Annotated[str | None, Parameter(metavar="FILE")]


def report(
    *runs: Annotated[str, Parameter(metavar="RUN")],
    html: OutputFile = None,
    csv: OutputFile = None,
    execution: Annotated[int | None, Parameter(metavar="N")] = None,
    raw_csv: Flag = False,
    parquet: OutputFile = None,
    messages: OutputFile = None,
    show_output: ShowOutput = False,
    show_queries: Flag = False,
    usage: ShowUsage = False,
    json: Json = False,
) -> int:
    """Print a run's table and write its HTML report, or compare two runs.

    Args:
        runs: Id or name of a flow run or its beginning, or the path of its results; by default the last run. A running
            flow run is reported up to now. Two runs are compared.
        html: HTML file; by default report.html next to the results
        csv: CSV file with a row for each execution. Text that a spreadsheet would run as a formula gets a leading
            apostrophe.
        execution: Print all of one execution instead: variables, fields or error, and output
        raw_csv: Write text to the CSV file unchanged, for programs other than spreadsheets
        parquet: Parquet file with the rows of the CSV file; needs pyarrow
        messages: File with a line of JSON for each conversation with a language model, as chat messages. The run needs
            --record full.
        show_queries: Print the code's queries to language models after the table, with the turns of recursive ones
    """
    output = OutputFormat(show_output, json, usage)
    if len(runs) > 1:
        options = (html, csv, execution, parquet, messages, raw_csv, show_output, show_queries, usage)
        if len(runs) > 2 or any(option is not None and option is not False for option in options):
            raise ConfigurationError("report compares two runs, and then takes only --json: name one run for the rest")
        return show_comparison(runs, output)
    run = runs[0] if runs else find_last_path()
    if execution is not None:
        return show_execution(run, execution, output)
    return show_report(run, html, csv, parquet, messages, raw_csv=raw_csv, shows_queries=show_queries, output=output)
