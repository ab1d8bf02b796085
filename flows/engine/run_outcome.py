"""The end of a flow run: an event for automations, and the reference that Prefect keeps."""

import itertools
import json
import math
from socket import gethostname
from typing import Any
from urllib.parse import quote

from httpx import HTTPError
from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.filesystems import RemoteFileSystem
from prefect.results import (  # These are public; only the type checker takes them for private.
    ResultRecord,  # pyright: ignore[reportPrivateImportUsage]
    ResultRecordMetadata,  # pyright: ignore[reportPrivateImportUsage]
)
from prefect.runtime import flow_run
from prefect.serializers import JSONSerializer

from ...tasks.ledger.run_record import RunRecord
from .run import Run

MAX_VALUES = 100  # variables, and also fields, in an event; Prefect limits its size
MAX_VALUE_CHARACTERS = 1_000  # characters of a variable or field as JSON

FLOW_RUN_ROLE = {"prefect.resource.role": "flow-run"}
REFERENCE_BLOCK, REFERENCE_PATH = "rlm-batch-references", "data://reference"
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

    Other processes and machines use the reference to read the run's report. The server keeps it, in the record's key,
    from which fsspec's file system `data` reads it. No file has it: code could replace a file by one that makes Prefect
    unpickle a result. If the server refuses the block of that file system, other processes get no result.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or run.deployment_id is None:
        return value
    try:
        block = await RemoteFileSystem(basepath=REFERENCE_PATH).asave(REFERENCE_BLOCK, overwrite=True)
    except HTTPError as error:
        get_run_logger().warning("state.result() returns nothing, as a block could not be saved: %s", error)
        return value
    reference = {key: getattr(record, key) for key in ("flow_run_id", "results_path")} | {"host": gethostname()}
    metadata = ResultRecordMetadata(serializer=JSONSerializer(object_decoder=DECODER), storage_block_id=block)
    data = ResultRecord[Any](metadata=metadata, result=reference).serialize()
    metadata.storage_key = f",{quote(data, safe='')}"
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
