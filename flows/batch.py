"""The batch flow: many pieces of code, or one piece over many inputs, each in a sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Annotated, Any

from pydantic import Field

from ..sandbox.errors import ConfigurationError
from .decorator import batch_flow
from .engine.job import Outcome, raise_failures, run_all
from .engine.labels import execution_label
from .inputs.readers import read_inputs
from .inputs.spilling import read_code_reference
from .parameters import (
    BatchConcurrency,
    CacheResults,
    Deadline,
    ExecutionsPerTask,
    Idempotent,
    LogOutput,
    MaxCost,
    MaxDepth,
    MaxLlmCalls,
    MaxLlmTokens,
    MaxWorkers,
    Model,
    OnFailure,
    Options,
    Provider,
    ResultsPath,
    Retries,
    RetryCodeErrors,
    ReuseSandboxes,
    Shards,
    Timeout,
)


@batch_flow("batch")
async def batch(
    code: Annotated[list[str] | str, Field(description="Pieces of Python code; or one piece, with inputs")],
    inputs: Annotated[
        list[dict[str, Any]] | str | None,
        Field(description="Variables for each execution of one piece of code, or a path to JSON lines or CSV"),
    ] = None,
    provider: Provider = "local",
    max_workers: MaxWorkers = 4,
    timeout: Timeout = 120,
    retries: Retries = 2,
    retry_code_errors: RetryCodeErrors = False,
    idempotent: Idempotent = False,
    on_failure: OnFailure = "raise",
    deadline: Deadline = None,
    reuse_sandboxes: ReuseSandboxes = False,
    executions_per_task: ExecutionsPerTask = None,
    cache_results: CacheResults = False,
    results_path: ResultsPath = None,
    shards: Shards = None,
    log_output: LogOutput = True,
    language_model: Model = None,
    batch_concurrency: BatchConcurrency = 4,
    max_depth: MaxDepth = 2,
    max_llm_calls: MaxLlmCalls = 50,
    max_llm_tokens: MaxLlmTokens = None,
    max_cost: MaxCost = None,
) -> Sequence[Outcome]:
    """Runs each piece of code in a sandbox, and returns their results in order.

    `code` is a list of texts; or one text with `inputs`, a list of variables or a path to JSON lines or CSV, and the
    text runs once for each. docs/reference.md says what the parameters mean.

    Raises ExecutionsFailed when all are done and some failed (with `on_failure="return"` a `Failure` stands in their
    place), and ConfigurationError before anything runs.
    """
    items = executions(code, inputs)
    options = Options(
        provider=provider,
        max_workers=max_workers,
        timeout=timeout,
        retries=retries,
        retry_code_errors=retry_code_errors,
        idempotent=idempotent,
        on_failure=on_failure,
        deadline=deadline,
        reuse_sandboxes=reuse_sandboxes,
        executions_per_task=executions_per_task,
        cache_results=cache_results,
        results_path=results_path,
        shards=shards,
        log_output=log_output,
        language_model=language_model,
        batch_concurrency=batch_concurrency,
        max_depth=max_depth,
        max_llm_calls=max_llm_calls,
        max_llm_tokens=max_llm_tokens,
        max_cost=max_cost,
    )
    outcomes = await run_all(items, len(items), options, execution_label)
    if on_failure == "raise":
        raise_failures(outcomes, "executions")
    return outcomes.results


class _Items(Sized, Iterable[tuple[str, dict[str, Any]]]):
    """Pairs of code and variables, made as they are asked for."""

    def __init__(self, codes: list[str], inputs: Any) -> None:
        self._codes, self._inputs = codes, inputs

    def __len__(self) -> int:
        return len(self._codes) if self._inputs is None else len(self._inputs)

    def __iter__(self) -> Any:
        if self._inputs is None:
            return ((code, {}) for code in self._codes)
        return ((self._codes[0], variables) for variables in self._inputs)


def executions(code: list[str] | str, inputs: list[dict[str, Any]] | str | None) -> _Items:
    """The pairs of code and variables that these parameters stand for. Raises ConfigurationError."""
    if isinstance(code, list):
        if inputs is not None:
            raise ConfigurationError("inputs go with one piece of code: pass code as one text, not as a list")
        if not code:
            raise ConfigurationError("the list of code is empty: there is nothing to run")
        return _Items(code, None)
    found = read_code_reference(code)
    if isinstance(found, list):
        return _Items(found, None)
    return _Items([found], None if inputs is None else read_inputs(inputs, "inputs"))
