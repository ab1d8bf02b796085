"""The sequence flow: pieces of code that share one sandbox and its state, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ..blocks.registry import resolve_provider
from ..sandbox.errors import ConfigurationError
from ..sandbox.result import Result
from ..tasks.execution import Execution, compute_key
from ..tasks.lane import Lane
from ..tasks.ledger.run_record import ReportSpec
from .decorator import batch_flow
from .engine.job import Outcome, Run, raise_failures
from .inputs.spilling import read_code_reference
from .parameters import (
    BatchConcurrency,
    Deadline,
    Idempotent,
    LogOutput,
    MaxCost,
    MaxDepth,
    MaxLlmCalls,
    MaxLlmTokens,
    Model,
    OnFailure,
    Options,
    Provider,
    ResultsPath,
    Retries,
    RetryCodeErrors,
    Timeout,
)

CONTEXT = "main"


@batch_flow("sequence")
async def sequence(
    steps: Annotated[list[str] | str, Field(description="Pieces of Python code, which share one sandbox's state")],
    stop_on_error: Annotated[bool, Field(description="Run no further step once one has failed")] = True,
    provider: Provider = "local",
    timeout: Timeout = 120,
    retries: Retries = 2,
    retry_code_errors: RetryCodeErrors = False,
    idempotent: Idempotent = False,
    on_failure: OnFailure = "raise",
    deadline: Deadline = None,
    results_path: ResultsPath = None,
    log_output: LogOutput = True,
    language_model: Model = None,
    batch_concurrency: BatchConcurrency = 4,
    max_depth: MaxDepth = 2,
    max_llm_calls: MaxLlmCalls = 50,
    max_llm_tokens: MaxLlmTokens = None,
    max_cost: MaxCost = None,
) -> Sequence[Outcome]:
    """Runs the steps in order in one sandbox, and returns their results in order.

    A name that one step defines is there in the next. A step that fails leaves what it had done; with
    `stop_on_error=False` the next one goes on from there. A step that ends its process, or loses its sandbox, takes
    the state with it, and no later step is run on an empty one: they fail with StateLost. State cannot be brought
    back, so a sequence that is retried begins again with the first step, unless all of its steps have results.

    Raises ExecutionsFailed if a step failed (with `on_failure="return"` a `Failure` stands in its place, and in that of
    each step that was not run), and ConfigurationError before anything runs.
    """
    codes = texts(steps)
    options = Options(
        provider=provider,
        max_workers=1,
        timeout=timeout,
        retries=retries,
        retry_code_errors=retry_code_errors,
        idempotent=idempotent,
        on_failure=on_failure,
        deadline=deadline,
        reuse_sandboxes=True,
        executions_per_task=1,
        cache_results=False,
        results_path=results_path,
        log_output=log_output,
        language_model=language_model,
        batch_concurrency=batch_concurrency,
        max_depth=max_depth,
        max_llm_calls=max_llm_calls,
        max_llm_tokens=max_llm_tokens,
        max_cost=max_cost,
    )
    async with _Sequence.begun(
        await resolve_provider(provider),
        len(codes),
        options,
        lambda execution: f"step {execution.index}",
        ReportSpec("step"),
    ) as run:
        executions = _chained(codes, await run.fingerprint())
        run.stop_on_error = stop_on_error
        run.complete = all(run.succeeded_before(execution.key) for execution in executions)
        await run.drive(iter(executions))
        if run.failed:
            run.not_run(executions, f"step {run.failed[0].meta.index} failed, and the steps after it build on it")
        outcomes = run.outcomes()
    if on_failure == "raise":
        raise_failures(outcomes, "steps", "begin again with the first step")
    return outcomes.results


def texts(steps: list[str] | str) -> list[str]:
    """The steps that this parameter stands for. Raises ConfigurationError."""
    if isinstance(steps, list):
        if not steps:
            raise ConfigurationError("the list of steps is empty: there is nothing to run")
        return steps
    found = read_code_reference(steps)
    return found if isinstance(found, list) else [found]


def _chained(codes: list[str], fingerprint: dict[str, Any]) -> list[Execution]:
    """The executions; the key of each holds all that came before, for that is what its result depends on."""
    found: list[Execution] = []
    before = ""
    for index, code in enumerate(codes):
        before = compute_key(code, {}, {}, {**fingerprint, "before": before})
        found.append(Execution(index, code, {}, before))
    return found


class _Sequence(Run):
    """One lane, whose executions share a process."""

    stop_on_error = True
    complete = False  # every step has a result in the ledger

    def lane(self) -> Lane:
        return Lane(
            self.provider,
            self.run_id,
            server=self.server,
            reuse=True,
            timeout=self.options.timeout,
            context=CONTEXT,
            slots=self.slots,
            asking=self.asking,
        )

    def recall(self, execution: Execution) -> Result | None:
        return super().recall(execution) if self.complete else None

    def goes_on(self) -> bool:
        return not (self.stop_on_error and self.failed)
