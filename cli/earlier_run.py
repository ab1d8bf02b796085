"""An earlier run: its ledger, and its parameters from the Prefect server."""

import asyncio
import sys
import uuid
from typing import Any

from ..blocks.storage.location_parsing import parse_scheme
from ..flows.parameters import FlowParameters
from ..flows.prefect_server import provide_server
from ..flows.registry import FLOWS, load_model
from ..flows.reporting.ledger_reader import LedgerReader, open_run_ledger
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.run_record import read_known_runs


def open_run(run: str) -> LedgerReader:
    """Open the ledger of a run, or the ledger at a path or a location. Raises ConfigurationError."""

    async def open_on_block() -> LedgerReader:
        async with provide_server():
            return await asyncio.to_thread(open_run_ledger, run)

    is_on_block = parse_scheme(run) == "block"  # Only a Prefect server can resolve the block.
    reader = asyncio.run(open_on_block()) if is_on_block else open_run_ledger(run)
    if reader.note:
        print(escape_text(reader.note), file=sys.stderr)
    return reader


def find_model(reader: LedgerReader) -> type[FlowParameters[Any]] | None:
    """Return the parameter model of the flow that ran last on a ledger; None if it is not a flow of rlm-batch."""
    flow = reader.records[-1].flow
    for name in FLOWS:
        model = load_model(name)
        if flow in (model.prefect_name, model.flow_name):
            return model
    return None


def read_parameters(reader: LedgerReader) -> dict[str, Any]:
    """Return the parameters of a ledger's last run: from this user's results root, or from the Prefect server.

    Parameters can name functions and files of this machine, so those in a ledger elsewhere do not count: another person
    or code could have written it. Raises ConfigurationError.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    record = reader.records[-1]
    origins = [known.origin for known in read_known_runs(get_results_root()).records if known.id == record.id]
    if origins and origins[0] is not None and not origins[0].hides_parameters:
        return origins[0].parameters

    async def read() -> dict[str, Any]:
        async with provide_server(), get_client() as client:
            flow_run = await client.read_flow_run(uuid.UUID(record.flow_run_id))
            return flow_run.parameters

    try:
        return asyncio.run(read())
    except (ObjectNotFound, ValueError):  # ValueError: the id in the record is not one of Prefect's.
        raise ConfigurationError(
            f"the Prefect server has no flow run {record.name or record.flow_run_id}, and this needs its parameters: "
            "set PREFECT_API_URL to the run's server, or start the flow again with its --results-path"
        ) from None
