"""The outcome of a flow run: the message of its state, and an event for automations and other flows."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from prefect.events import emit_event

from ...tasks.ledger.run_record import RunRecord
from ..reporting.report import describe_run
from ..reporting.summary import RunSummary

MAX_VALUES = 100  # variables, and fields, in an event, whose size Prefect limits
MAX_VALUE_CHARACTERS = 1_000  # characters of the JSON of one of them


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a flow run, as text and as the payload of its event."""

    record: RunRecord
    message: str
    payload: dict[str, Any]

    def emit(self, kind: str) -> None:
        """Send the event `rlm-batch.run.KIND`, such as `rlm-batch.run.completed`."""
        emit_event(
            f"rlm-batch.run.{kind}",
            resource={
                "prefect.resource.id": f"rlm-batch.run.{self.record.flow_run_id}",
                "prefect.resource.name": self.record.name,
                "rlm-batch.flow": self.record.flow,
            },
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self.record.flow_run_id}",
                    "prefect.resource.role": "flow-run",
                }
            ],
            payload=self.payload,
        )


def describe_outcome(record: RunRecord, summary: RunSummary) -> RunOutcome:
    """Return the counts, the best trial if there is one, and the place of the results."""
    best = summary.best_trial.result
    payload: dict[str, Any] = {
        "flow": record.flow,
        "name": record.name,
        "total": record.total,
        "succeeded": summary.succeeded,
        "failed": summary.failed,
        "not_run": summary.not_run,
        "objective": record.objective,
        "direction": record.direction,
        "best": None
        if best is None
        else {
            "index": best.meta.index,
            "value": _keep_finite(summary.best_trial.score),
            "variables": _keep_short(best.meta.variables),
            "fields": _keep_short(best.outputs),
        },
        "results_path": record.results_path,
    }
    return RunOutcome(record, f"{describe_run(record, summary)}; results in {record.results_path}", payload)


def _keep_short(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are JSON and short enough for an event."""
    kept: dict[str, Any] = {}
    for name, value in itertools.islice(values.items(), MAX_VALUES):
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            continue
        if len(text) <= MAX_VALUE_CHARACTERS:
            kept[name] = value
    return kept


def _keep_finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
