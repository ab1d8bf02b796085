"""The sequence flow: pieces of code that share one sandbox and its state, one after the other."""

from collections.abc import Sequence
from typing import Annotated, Any, Unpack

from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..sandbox.result import Outcome
from ..tasks.execution import Execution, compute_key
from ..tasks.ledger.run_record import ReportSpec
from .decorator import batch_flow
from .engine.failures import raise_failures
from .engine.job import open_job
from .inputs.conversion import Code, Items
from .inputs.readers import check_variables
from .inputs.spilling import check_codes, read_code_reference, read_codes
from .parameters import Options, SequenceParameters

STATE_CONTEXT = "main"


@batch_flow("sequence")
async def sequence(
    steps: Annotated[Items[Code] | Code, Field(description="Pieces of Python code, which share one sandbox's state")],
    stop_on_error: Annotated[bool, Field(description="Run no further step once one has failed")] = True,
    **parameters: Unpack[SequenceParameters],
) -> Sequence[Outcome]:
    """Runs the steps in order in one sandbox, and returns their results in order.

    A name that one step defines is there in the next. A step that fails leaves what it had done; with
    `stop_on_error=False` the next one goes on from there. A step that ends its process, or loses its sandbox, takes
    the state with it, and no later step is run on an empty one: they fail with StateLost. State cannot be brought
    back, so a sequence that is retried begins again with the first step, unless all of its steps have results.

    Raises ExecutionsFailed if a step failed (with `on_failure="return"` a `Failure` stands in its place, and in that of
    each step that was not run), and ConfigurationError before anything runs.
    """
    codes = texts(steps)  # type: ignore[arg-type]  # lists and text by now
    options = Options.from_parameters(parameters, max_workers=1, reuse_sandboxes=True, executions_per_task=1)
    check_variables(codes[0], [()], needs_all=options.prepare is None)  # those after it find what it leaves
    async with open_job(
        total=len(codes),
        options=options,
        label=lambda execution: f"step {execution.index}",
        report_spec=ReportSpec("step"),
        state_context=STATE_CONTEXT,
        stop_on_failure=stop_on_error,
    ) as job:
        executions = _chain_steps(codes, await job.compute_fingerprint())
        # Results of some steps are of no use: the state that the others build on is not in the ledger.
        results = [job.cache.find_result(execution) for execution in executions]
        is_complete = all(result is not None for result in results)
        await job.executor.execute_all(
            iter(executions), lambda execution: results[execution.index] if is_complete else None
        )
        if failed := job.store.failures:
            job.skip(executions, f"step {failed[0].meta.index} failed, and the steps after it build on it")
        outcomes = job.collect_outcomes()
    if options.on_failure == "raise":
        raise_failures(outcomes, "steps", "begin again with the first step")
    return outcomes.results


def texts(steps: list[str] | str) -> list[str]:
    """The steps that this parameter stands for. Raises ConfigurationError."""
    if isinstance(steps, list):
        if not steps:
            raise ConfigurationError("the list of steps is empty: there is nothing to run")
        check_codes("steps", steps)
        return read_codes(steps)
    found = read_code_reference(steps)
    return found if isinstance(found, list) else [found]


def _chain_steps(codes: list[str], fingerprint: dict[str, Any]) -> list[Execution]:
    """The executions; the key of each holds all that came before, for its result depends on that."""
    executions: list[Execution] = []
    key = ""
    for index, code in enumerate(codes):
        key = compute_key(code, {}, {}, {**fingerprint, "before": key})
        executions.append(Execution(index, code, {}, key))
    return executions
