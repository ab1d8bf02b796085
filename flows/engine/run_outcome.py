"""The end of a flow run: an event for automations, and the reference that Prefect keeps."""

import asyncio
import itertools
import json
import math
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.results import (  # These are public; only the type checker takes them for private.
    ResultRecord,  # pyright: ignore[reportPrivateImportUsage]
    ResultRecordMetadata,  # pyright: ignore[reportPrivateImportUsage]
)
from prefect.runtime import flow_run
from prefect.serializers import JSONSerializer

from ...blocks.storage.location import write_file
from ...tasks.ledger.result_index import get_results_root
from ...tasks.ledger.run_record import RunRecord
from .run import Run

MAX_VALUES = 100  # variables, and also fields, in an event; Prefect limits its size
MAX_VALUE_CHARACTERS = 1_000  # characters of a variable or field as JSON

FLOW_RUN_ROLE = {"prefect.resource.role": "flow-run"}
DECODER = "rlm_batch.flows.run_report.load_reference"  # Prefect imports it to read a result.


def emit_run_event(run: Run | None, kind: str) -> None:
    """Send the event `rlm-batch.run.KIND`, such as `rlm-batch.run.completed`, with the counts and the best trial.

    `run` is None if the flow run failed before it had one, as with a wrong parameter.
    """
    flow_name, run_name = flow_run.flow_name, flow_run.name
    payload: dict[str, Any] = {"flow": flow_name, "name": run_name, "best": None}
    if run is not None and run.summary is not None:
        for name in ("total", "objective", "direction", "results_path"):
            payload[name] = getattr(run.record, name)
        for name in ("succeeded", "failed", "not_run"):
            payload[name] = getattr(run.summary, name)
        best, score = run.summary.best.result, run.summary.best.score
        if score is not None and not math.isfinite(score):
            score = None  # JSON has no such number.
        if best is not None:
            payload["best"] = {
                "index": best.meta.index,
                "value": score,
                "variables": _select_short_values(best.meta.variables),
                "fields": _select_short_values(best.outputs),
            }
    emit_event(
        f"rlm-batch.run.{kind}",
        resource={
            "prefect.resource.id": f"rlm-batch.run.{flow_run.id}",
            "prefect.resource.name": run_name,
            "rlm-batch.flow": flow_name,
        },
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", **FLOW_RUN_ROLE}],
        payload=payload,
    )


async def with_reference(value: Any, record: RunRecord) -> Any:
    """Return the value. For a deployment's run, put it into a Prefect result record that refers to the ledger.

    Other processes use the reference to read the run's report. The reference is a file of about 400 bytes below the
    results root. It is not in the ledger, which may be on a volume: code there could replace the file by one that makes
    Prefect unpickle a result. If the file cannot be written, other processes get no result.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or run.deployment_id is None:
        return value
    path = get_results_root() / record.flow_run_id / f"result-{record.flow_run_id}.json"
    metadata = ResultRecordMetadata(storage_key=str(path), serializer=JSONSerializer(object_decoder=DECODER))
    reference = {"flow_run_id": record.flow_run_id, "results_path": record.results_path}
    try:
        data = ResultRecord[Any](metadata=metadata, result=reference).serialize()
        await asyncio.to_thread(write_file, path, data)
    except OSError as error:
        get_run_logger().warning("%s cannot be written (%s), so state.result() returns nothing", path, error.strerror)
        return value
    result_record = ResultRecord[Any](metadata=metadata, result=value)
    result_record.mark_persisted()
    return result_record


def _select_short_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are JSON and short enough for an event."""
    short_values: dict[str, Any] = {}
    for name, value in itertools.islice(values.items(), MAX_VALUES):
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            continue
        if len(text) <= MAX_VALUE_CHARACTERS:
            short_values[name] = value
    return short_values
