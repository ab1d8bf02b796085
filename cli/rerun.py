"""The command `rerun`: runs one execution of an earlier run again, alone, with its output live."""

import asyncio
import uuid
from dataclasses import fields
from itertools import islice
from typing import Any

from ..flows.batch import BatchParameters
from ..flows.inputs.spilling import read_text_reference
from ..flows.parameters import Options
from ..flows.plan import Plan
from ..flows.prefect_server import provide_server
from ..flows.registry import FLOWS, load_model
from ..flows.reporting.ledger_reader import LedgerReader
from ..sandbox.errors import ConfigurationError
from ..tasks.repeats import Item
from .output import OutputFormat
from .report import open_run
from .run_flow import run_flow


def rerun_execution(run: str, number: int, output: OutputFormat) -> int:
    """Run one execution of a run again, in a new run of its own, and return the exit status.

    The Prefect server has the run's parameters, so it must be the server of the run.

    Raises:
        ConfigurationError: There is no such run or execution, or it cannot run alone.
    """
    reader = open_run(run)
    flow = reader.records[-1].flow
    models = map(load_model, FLOWS)
    model = next((model for model in models if flow in (model.prefect_name, model.flow_name)), None)
    if model is None or model.flow_name not in ("batch", "sweep", "chunks"):
        raise ConfigurationError(
            f"rerun takes runs of batch, sweep and chunks, and {run} is of {flow}: start that again with its "
            "--results-path"
        )
    parameters = model.parse(asyncio.run(_read_parameters(reader)))
    plan = parameters.make_plan()
    code, variables = _find_execution(reader, plan, str(getattr(parameters, "code", "")), number)
    values = {field.name: getattr(plan.options, field.name) for field in fields(Options)}
    # The earlier run's results would count as this run's.
    values |= {"results_path": None, "cache_results": False, "shards": None}
    if plan.volume_name is not None:
        values["provider_options"] = {**(values["provider_options"] or {}), "volume_name": plan.volume_name}
    return run_flow(BatchParameters, [], output, {"code": code, "inputs": [variables], **values})


async def _read_parameters(reader: LedgerReader) -> dict[str, Any]:
    """Return the parameters of a ledger's last run, from the Prefect server. Raises ConfigurationError."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    record = reader.records[-1]
    async with provide_server(), get_client() as client:
        try:
            return (await client.read_flow_run(uuid.UUID(record.flow_run_id))).parameters
        except (ObjectNotFound, ValueError):
            raise ConfigurationError(
                f"the Prefect server has no flow run {record.name or record.flow_run_id}, and a rerun needs its "
                "parameters: set PREFECT_API_URL to the run's server, or start the flow again with its --results-path"
            ) from None


def _find_execution(reader: LedgerReader, plan: Plan, code: str, number: int) -> Item:
    """Return the code and the variables of one execution. Raises ConfigurationError."""
    item = None
    if plan.search:
        # Only the ledger has the points of a search.
        outcome = next((outcome for outcome in reader.read_outcomes() if outcome.meta.index == number), None)
        item = None if outcome is None else (read_text_reference(code), outcome.meta.variables)
    elif number >= 0:
        item = next(islice(plan.items, number, None), None)
    if item is None:
        raise ConfigurationError(
            f"the run has no execution {number}, or it needs others: rlm-batch report {reader.ledger.path} lists them"
        )
    return item
