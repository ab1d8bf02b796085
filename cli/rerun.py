"""The command `rerun`: runs one execution of an earlier run again, alone, with its output live."""

from dataclasses import fields
from itertools import islice

from ..flows.inputs.spilling import read_text_reference
from ..flows.parameters import Options
from ..flows.plans.batch import BatchParameters
from ..sandbox.errors import ConfigurationError
from .earlier_run import find_model, open_run, read_parameters
from .output import Json, OutputFormat, ShowOutput, ShowUsage
from .run_flow import run_flow


def rerun(
    run: str, number: int, /, *, show_output: ShowOutput = False, usage: ShowUsage = False, json: Json = False
) -> int:
    """Run one execution of a run again, in a new run, and return the exit status.

    Runs of this machine have their parameters in their records, unless these hide secrets. Otherwise the run's own
    Prefect server has them.

    Args:
        run: Id or name of a flow run, or the path of its results
        number: The number of the execution in the run's table

    Raises:
        ConfigurationError: There is no such run or execution, or it cannot run alone.
    """
    reader = open_run(run)
    model = find_model(reader)
    if model is None or model.flow_name not in ("batch", "sweep", "chunks"):
        raise ConfigurationError(
            f"rerun takes runs of batch, sweep and chunks, and {run} is of {reader.records[-1].flow}: "
            "start that again with its --results-path"
        )
    parameters = model.parse(read_parameters(reader))
    plan = parameters.make_plan()
    if plan.search:  # Only the ledger has the points of a search.
        code, variables = read_text_reference(parameters.code), reader.find_outcome(number).meta.variables  # type: ignore[attr-defined]
    else:
        items = list(islice(plan.items, number, number + 1)) if number >= 0 else []
        if not items:
            raise ConfigurationError(
                f"the run has no execution {number}, or it needs others: rlm-batch report {reader.ledger.path} lists "
                "them"
            )
        code, variables = items[0]
    values = {field.name: getattr(parameters.options, field.name) for field in fields(Options)}
    # Otherwise results of the earlier run would count as results of this run.
    values |= {"results_path": None, "cache_results": False, "shards": None}
    output = OutputFormat(show_output, json, usage)
    return run_flow(BatchParameters, [], output, {"code": code, "inputs": [variables], **values})
