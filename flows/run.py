"""What batch and sweep share: running many executions in lanes, with a ledger, and saying how they went."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import get_run_logger
from prefect.context import FlowRunContext
from pydantic import Field

from ..blocks.asking import Asking, asking
from ..blocks.provider import SandboxProvider
from ..blocks.resolve import resolve
from ..sandbox.budget import Usage
from ..sandbox.errors import ConfigurationError, DeadlineExceeded, ExecutionsFailed, RlmBatchError
from ..sandbox.queries import Track
from ..sandbox.result import Failure, Meta, Result
from ..tasks.execute import RetryPolicy, Work, with_policy
from ..tasks.execution import Execution, identified
from ..tasks.index import ResultIndex
from ..tasks.lane import Lane, ProviderUnusable
from ..tasks.ledger import Ledger, results_root
from ..tasks.query import Tracker

Outcome = Result | Failure

TASK_RUNS = 1000  # of one flow run, at most: a server records some fifty a second, 250 with the settings that we ship

# The parameters that every flow over many executions has, with their bounds for the schema that the UI shows.
Provider = Annotated[str, Field(description="local, local:none, or a saved block such as local-sandbox/NAME")]
MaxWorkers = Annotated[int, Field(ge=1, description="Executions at one time, each in a sandbox of its own")]
Timeout = Annotated[float, Field(gt=0, description="Seconds for each execution")]
Retries = Annotated[int, Field(ge=0, description="How often an execution whose sandbox failed is tried again")]
RetryCodeErrors = Annotated[bool, Field(description="Try again also when the code itself failed or timed out")]
Idempotent = Annotated[bool, Field(description="Try again also when a sandbox was lost while the code may have run")]
OnFailure = Annotated[
    Literal["raise", "return"], Field(description="Fail the flow run when executions failed, or return the failures")
]
Deadline = Annotated[float | None, Field(gt=0, description="Seconds for the whole flow run")]
ReuseSandboxes = Annotated[bool, Field(description="Keep a worker's sandbox; each execution still has its own process")]
ExecutionsPerTask = Annotated[
    int | None, Field(ge=1, description="Executions in one task run; by itself about 1,000 runs")
]
CacheResults = Annotated[bool, Field(description="Take results of identical executions of earlier flow runs")]
ResultsPath = Annotated[str | None, Field(description="The ledger's directory; by default one below the results root")]


Model = Annotated[
    str | None,
    Field(
        description="What the code may ask: a model in LiteLLM's naming, or a saved block such as language-model/NAME"
    ),
]
BatchConcurrency = Annotated[int, Field(ge=1, description="Requests to the model at one time, for each execution")]
MaxDepth = Annotated[int, Field(ge=0, description="How deep recursive queries may go; plain code is at depth 0")]
MaxLlmCalls = Annotated[int | None, Field(ge=0, description="Calls of the model, for each execution")]
MaxLlmTokens = Annotated[int | None, Field(ge=0, description="Tokens of prompts and answers, for each execution")]
MaxCost = Annotated[float | None, Field(ge=0, description="US dollars for the model, for the whole flow run")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parameters that the flows share, as they were given."""

    provider: str
    max_workers: int
    timeout: float
    retries: int
    retry_code_errors: bool
    idempotent: bool
    on_failure: Literal["raise", "return"]
    deadline: float | None
    reuse_sandboxes: bool
    executions_per_task: int | None
    cache_results: bool
    results_path: str | None
    language_model: str | None
    batch_concurrency: int
    max_depth: int
    max_llm_calls: int | None
    max_llm_tokens: int | None
    max_cost: float | None

    async def asking(self, track: Track) -> Asking | None:
        """What each execution may ask, None without a model. Raises ConfigurationError."""
        if self.language_model is None:
            return None
        return await asking(
            self.language_model,
            max_cost=self.max_cost,
            track=track,
            batch_concurrency=self.batch_concurrency,
            max_depth=self.max_depth,
            max_llm_calls=self.max_llm_calls,
            max_llm_tokens=self.max_llm_tokens,
        )


class Observer:
    """What a flow run tells whoever called it in this process, as it goes; the methods do nothing unless overridden."""

    def begun(self, total: int, isolation: str, results_path: str) -> None:
        """The run is about to start; `isolation` is the level that is in force."""

    def started(self, index: int) -> None:
        """An execution's task run has begun."""

    def ended(self, outcome: Outcome, *, cached: bool) -> None:
        """An execution has its outcome; `cached` where it was read from a ledger and not run."""


observer: ContextVar[Observer] = ContextVar("rlm_batch_observer", default=Observer())  # noqa: B039 - it has no state


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Every execution's outcome, in order, and where they are written."""

    results: list[Outcome]
    results_path: str

    @property
    def failures(self) -> list[Failure]:
        """Those that failed for good."""
        return [outcome for outcome in self.results if isinstance(outcome, Failure)]


async def run_all(
    items: Iterable[tuple[str, dict[str, Any]]],
    total: int,
    options: Options,
    label: Callable[[Execution], str],
    uploads: dict[str, Path] | None = None,
) -> Outcomes:
    """Runs every pair of code and variables, `max_workers` at a time, and returns when all have an outcome.

    `label` names an execution's task run; `uploads` are files that each execution finds, by their paths there. Raises
    ConfigurationError before anything runs, and OSError where the ledger cannot be written.
    """
    provider = await resolve(options.provider)
    isolation = await provider.check()
    tracker = Tracker()
    asking = await options.asking(tracker.track)
    run_id = _flow_run_id()
    ledger = Ledger(options.results_path or results_root() / run_id)
    ledger.create()
    log = get_run_logger()
    log.info("%d executions on %s: %s; results in %s", total, provider.provider_name, isolation, ledger.path)
    observer.get().begun(total, isolation, str(ledger.path))
    run = _Run(provider, run_id, ledger, options, total, label, log, asking, uploads or {})
    model = None if asking is None else asking.model.fingerprint()
    try:
        async with tracker:
            await run.drive(identified(items, await provider.fingerprint(), model))
    finally:
        ledger.close()
        if asking is not None:
            log.info("the model was called %s", described(asking.spent.used))
    outcomes = Outcomes(run.outcomes(), str(ledger.path))
    failed = len(outcomes.failures)
    log.info("%d of %d executions succeeded; results in %s", total - failed, total, ledger.path)
    return outcomes


def raise_failures(outcomes: Outcomes, what: str) -> None:
    """Raises ExecutionsFailed if there are failures: how many, the first of them, and where the results are."""
    failures = outcomes.failures
    if failures:
        first = failures[0]
        raise ExecutionsFailed(
            f"{len(failures)} of {len(outcomes.results)} {what} failed, first number {first.meta.index} with "
            f"{type(first.error).__name__}: {first.error.summary} -- the results are in {outcomes.results_path}; retry "
            "the flow run to run only those that failed, or pass on_failure='return' to get them beside the results",
            results=outcomes.results,
            failures=failures,
            results_path=outcomes.results_path,
        )


def described(used: Usage) -> str:
    """What calls of a model took, for a person."""
    price = "at a cost that is not known" if used.cost is None else f"for ${used.cost:.6f}"
    return f"{used.calls} times: {used.prompt_tokens:,} + {used.completion_tokens:,} tokens, {price}"


def _flow_run_id() -> str:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("this must be called in a flow run")
    return str(context.flow_run.id)


class _Run:
    """One flow run's lanes, and the outcomes as they come."""

    def __init__(
        self,
        provider: SandboxProvider,
        run_id: str,
        ledger: Ledger,
        options: Options,
        total: int,
        label: Callable[[Execution], str],
        log: logging.Logger | logging.LoggerAdapter[Any],
        asking: Asking | None,
        uploads: dict[str, Path],
    ) -> None:
        self._asking = asking
        self._uploads = uploads
        self._provider = provider
        self._run_id = run_id
        self._ledger = ledger
        self._options = options
        self._label = label
        self._log = log
        self._observer = observer.get()
        self._outcomes: list[Outcome | None] = [None] * total
        self._under_way: dict[int, Execution] = {}
        self._policy = RetryPolicy(options.retries, options.retry_code_errors, options.idempotent)
        self._per_task = options.executions_per_task or max(1, math.ceil(total / TASK_RUNS))
        self._total = total

    async def drive(self, executions: Iterator[Execution]) -> None:
        """Runs what has no result yet. Every execution has an outcome when it returns."""
        to_do = self._to_do(executions)
        works = self._works(to_do)
        task = with_policy(self._policy, self._provider.provider_name)
        lanes = min(self._options.max_workers, math.ceil(self._total / self._per_task))
        try:
            async with asyncio.timeout(self._options.deadline), asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(self._lane(task, works))
        except TimeoutError:
            self._out_of_time(to_do)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _lane(self, task: Any, works: Iterator[Work]) -> None:
        lane = Lane(
            self._provider,
            self._run_id,
            reuse=self._options.reuse_sandboxes,
            timeout=self._options.timeout,
            asking=self._asking,
            uploads=self._uploads,
        )
        try:
            for work in works:
                state = await task(lane, work, return_state=True)
                if state.is_cancelled():
                    raise asyncio.CancelledError
                if work.remaining:
                    self._unsettled(await state.result(raise_on_failure=False), state)
        finally:
            await lane.close()

    def _unsettled(self, error: Any, state: Any) -> None:
        if isinstance(error, ProviderUnusable) and error.__cause__ is not None:
            raise error.__cause__
        if isinstance(error, BaseException):
            raise error
        raise RuntimeError(f"a task run ended as {state.name} with executions undone: {state.message}")

    def _to_do(self, executions: Iterator[Execution]) -> Iterator[Execution]:
        """The executions without a result; the others are settled as they come by."""
        known = self._ledger.best()
        index = None
        if self._options.cache_results:
            index = ResultIndex(results_root())
            index.refresh()
        for execution in executions:
            line = known.pop(execution.key, None)
            cached = line.outcome() if line is not None and line.succeeded else None
            if cached is None and index is not None:
                line = index.find(execution.key)
                cached = line.outcome() if line is not None else None
                if cached is not None:
                    self._ledger.write(execution.key, self._placed(cached, execution))
            if cached is None:
                self._under_way[execution.index] = execution
                yield execution
            else:
                outcome = self._outcomes[execution.index] = self._placed(cached, execution)
                self._observer.ended(outcome, cached=True)

    @staticmethod
    def _placed(outcome: Outcome, execution: Execution) -> Outcome:
        """A cached outcome, at the place that its execution has in this flow run."""
        from dataclasses import replace

        outcome.meta = replace(outcome.meta, index=execution.index)
        return outcome

    def _works(self, executions: Iterator[Execution]) -> Iterator[Work]:
        while group := list(itertools.islice(executions, self._per_task)):
            label = self._label(group[0])
            if len(group) > 1:
                label = f"{label} and {len(group) - 1} more"
            for execution in group:
                self._observer.started(execution.index)
            yield Work(label, group, self._policy, self._ledger, self._settled)

    def _settled(self, execution: Execution, outcome: Outcome) -> None:
        self._outcomes[execution.index] = outcome
        del self._under_way[execution.index]
        if isinstance(outcome, Failure):
            self._log.warning(
                "%s failed: %s: %s", self._label(execution), type(outcome.error).__name__, outcome.error.summary
            )
        self._observer.ended(outcome, cached=False)

    def _out_of_time(self, to_do: Iterator[Execution]) -> None:
        """What was not done by the deadline fails with that. It is not written to the ledger: it may be run yet."""
        for execution in to_do:
            self._under_way[execution.index] = execution
        for execution in list(self._under_way.values()):
            error = DeadlineExceeded(
                f"the flow run's deadline of {self._options.deadline:g} s passed before this execution had ended; "
                "retry the flow run, or give it more with deadline="
            )
            meta = Meta(index=execution.index, variables=execution.variables, provider=self._provider.provider_name)
            self._settled(execution, Failure(error, meta))

    def outcomes(self) -> list[Outcome]:
        """Every outcome, in order."""
        found = [outcome for outcome in self._outcomes if outcome is not None]
        if len(found) != self._total:
            raise ConfigurationError(
                f"the inputs changed while they were read: {self._total} at first, {len(found)} at the end"
            )
        return found


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of what made the lanes end, the one that a person has to read: ours before others."""
    leaves: list[BaseException] = []

    def collect(group: BaseExceptionGroup[BaseException]) -> None:
        for error in group.exceptions:
            if isinstance(error, BaseExceptionGroup):
                collect(error)
            else:
                leaves.append(error)

    collect(errors)
    return next((error for error in leaves if isinstance(error, RlmBatchError)), leaves[0])


def resolved_path(path: str | None) -> str | None:
    """A path as whoever submits means it, made absolute."""
    return None if path is None else str(Path(path).expanduser().absolute())
