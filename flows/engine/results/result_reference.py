"""What Prefect keeps as the result of a deployment's run: a reference to its ledger, from which the report is read."""

import asyncio
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.results import (  # public there, though its own type checks do not say so
    ResultRecord,  # pyright: ignore[reportPrivateImportUsage]
    ResultRecordMetadata,  # pyright: ignore[reportPrivateImportUsage]
)
from prefect.serializers import JSONSerializer

from ....blocks.storage.location import write_file
from ....tasks.ledger.result_index import get_results_root
from ....tasks.ledger.run_record import RunRecord

DECODER = "rlm_batch.flows.run_report.load_reference"  # Prefect imports it to read a result.


async def with_reference(value: Any, record: RunRecord) -> Any:
    """The value, or for a deployment's run a record of Prefect's that has it here, and the run's report elsewhere.

    The reference is a file of some 400 bytes below the results root. It is not in the ledger, which may be on a volume:
    Prefect unpickles the result if the file says so, and code could have exchanged the file. Where it cannot be
    written, the run has no result elsewhere.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return value
    path = get_results_root() / record.flow_run_id / f"result-{record.flow_run_id}.json"
    metadata = ResultRecordMetadata(storage_key=str(path), serializer=JSONSerializer(object_decoder=DECODER))
    reference = {"flow_run_id": record.flow_run_id, "results_path": record.results_path}
    try:
        data = ResultRecord[Any](metadata=metadata, result=reference).serialize()
        await asyncio.to_thread(write_file, path, data)
    except OSError as error:
        get_run_logger().warning("%s cannot be written (%s): state.result() has nothing", path, error.strerror)
        return value
    kept = ResultRecord[Any](metadata=metadata, result=value)
    kept.mark_persisted()
    return kept
