"""The command `runs`: the runs of this machine, the latest first. It reads records only, and imports no Prefect."""

import sys
import time
from pathlib import Path
from typing import Any

from ..flows.reporting.table import MAX_SHOWN_ROWS, format_cell
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.run_record import RunRecord, read_known_runs
from .output import Json, print_json, print_table

COLUMNS = ["name", "flow", "began (UTC)", "succeeded", "best", "results"]
SHORT_ID = 8  # characters of a run's id in the table, which are enough for `rlm-batch report`


def runs(*, json: Json = False) -> int:
    """Print a row for each run, or as JSON a line."""
    known = read_known_runs(get_results_root())
    records = known.list_latest()
    if json:
        for record in records:
            print_json(_describe(record))
    else:
        shown = records[:MAX_SHOWN_ROWS]
        print_table([COLUMNS, *(_format_row(record, known.root) for record in shown)], len(records))
        print(f"Results without a path are below {known.root}", file=sys.stderr)
    return 0


def _describe(record: RunRecord) -> dict[str, Any]:
    """Return a run as an object for JSON."""
    return {
        "name": record.name,
        "tags": record.tags,
        "flow": record.flow,
        "flow_run_id": record.flow_run_id,
        "status": record.get_status() or "running",
        "began": record.began,
        "ended": record.ended,
        "total": record.total,
        "succeeded": record.succeeded,
        "failed": record.failed,
        "objective": record.objective or [item["name"] for item in record.objectives] or None,
        "best": record.best,
        "best_index": record.best_index,
        "results_path": record.results_path,
    }


def _format_row(record: RunRecord, root: Path) -> list[str]:
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.began)) if record.began else ""
    best = ""
    if record.front:
        best = f"Pareto front of {record.front:,}"
    elif record.best is not None:
        best = f"{record.objective} {format_cell(record.best)}"
    path = record.results_path
    if Path(path).parent == root:  # `rlm-batch report` finds it by its name, or by the beginning of an id.
        path = Path(path).name
        if path == record.flow_run_id:
            path = path[:SHORT_ID]
    name = f"{record.name} [{', '.join(record.tags)}]" if record.tags else record.name
    return [name, record.flow, began, _format_counts(record), best, path]


def _format_counts(record: RunRecord) -> str:
    total = f"of {record.total:,}"
    if record.succeeded is not None:
        failed = f", {record.failed:,} failed" if record.failed else ""
        return f"{record.succeeded:,} {total}{failed}"
    status = record.get_status() or "running"
    return total if status == "ended" else f"{status}, {total}"
