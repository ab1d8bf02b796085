"""The report on a flow run of any kind, read from its ledger."""

from typing import Any

from ..sandbox.errors import ConfigurationError
from .plan import Outcomes
from .reporting.ledger_reader import open_run_ledger
from .reports import TrialsReport


def load_report(run: str) -> TrialsReport:
    """Return the report on a flow run, which may still be running. This needs no server.

    Args:
        run: The run's id, its name, or the path or location of its results.

    Returns:
        The report. If an execution ran several times, the report has the outcome that counts.

    Raises:
        ConfigurationError: There is no such run.
    """
    reader = open_run_ledger(str(run))
    record = reader.records[-1]
    all_outcomes = list(reader.read_outcomes(with_reduction=True))
    outcomes = Outcomes(all_outcomes, [], str(reader.ledger.path), record.report_spec)
    results, reduction = outcomes.split()
    report = TrialsReport(results, outcomes.results_path, outcomes.spec, record.flow, record.name)
    report.reduction = reduction
    return report


def load_reference(value: dict[str, Any]) -> Any:
    """Return the report for a reference, which is the result of a deployment's run. Return other dicts unchanged.

    Prefect calls this function when a program reads the run's result. Raises ConfigurationError if this process cannot
    read the ledger.
    """
    if value.keys() - {"host"} != {"flow_run_id", "results_path"}:
        return value
    try:
        return load_report(value["results_path"])
    except ConfigurationError as error:
        host = value.get("host", "an unknown machine")
        path = value["results_path"]
        raise ConfigurationError(f"{error.text}. The run wrote {path} on {host}: read it there") from None
