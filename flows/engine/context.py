"""What the parts of one flow run are made of: its deadline, what it may ask, its slots, lanes and executor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger
from prefect.context import FlowRunContext

from ...blocks.language_model.model_access import ModelAccess, open_model_access
from ...blocks.provider import SandboxProvider
from ...blocks.registry import resolve_provider
from ...blocks.volume import check_volume_name
from ...tasks.capacity.slots import Slots, open_slots
from ...tasks.execution import Execution
from ...tasks.lane import Lane
from ...tasks.ledger.ledger import Ledger
from ...tasks.query_task import QueryTracker
from ...tasks.retry import RetryPolicy
from ...tasks.task_log import LineBudget
from ..cleanup.orphans import register_own_run
from ..cleanup.server_identity import get_server_id
from ..parameters import MAX_TASK_RUNS, Options
from ..reporting.report import describe_usage
from .events import Log
from .executor import LaneExecutor, ResourceUsage
from .failures import Deadline
from .outcome_store import OutcomeRecorder

Label = Callable[[Execution], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What the parts of a flow run need to know of it. `server_id` is the Prefect server's, for sandboxes' labels."""

    provider: SandboxProvider
    options: Options
    label: Label
    log: Log
    run_id: str
    server_id: str
    deadline: Deadline
    model_access: ModelAccess | None
    tracker: QueryTracker
    usage: ResourceUsage


async def resolve_provider_with_volume(name: str, volume_name: str | None) -> SandboxProvider:
    """The provider of that name, with that volume if one is named. Raises ConfigurationError."""
    provider = await resolve_provider(name)
    if volume_name is None:
        return provider
    return provider.model_copy(update={"volume_name": check_volume_name(volume_name)})


async def open_run_context(provider: SandboxProvider, options: Options, label: Label) -> RunContext:
    """What is known of the flow run that this is called in, with what its executions may ask.

    The deadline starts here. Raises ConfigurationError.
    """
    tracker = QueryTracker()
    model_access = None
    if options.language_model is not None:
        model_access = await open_model_access(
            options.language_model,
            max_cost=options.max_cost,
            track=tracker.track_query,
            batch_concurrency=options.batch_concurrency,
            max_depth=options.max_depth,
            max_llm_calls=options.max_llm_calls,
            max_llm_tokens=options.max_llm_tokens,
        )
    context = RunContext(
        provider=provider,
        options=options,
        label=label,
        log=get_run_logger(),
        run_id=get_flow_run_id(),
        deadline=Deadline.start(options.deadline),
        server_id=await get_server_id(),
        model_access=model_access,
        tracker=tracker,
        usage=ResourceUsage(),
    )
    register_own_run(context.run_id)
    return context


@asynccontextmanager
async def open_capacity(context: RunContext) -> AsyncIterator[Slots]:
    """The slots of the provider's limit; within it queries are tracked, and at its end their usage is logged."""
    try:
        async with context.tracker, open_slots(context.provider, context.run_id, context.log) as slots:
            yield slots
    finally:
        if context.model_access is not None:
            used = context.model_access.spent.usage + context.usage.model
            context.log.info("the model was called %s", describe_usage(used))


def make_lane_factory(
    context: RunContext,
    slots: Slots,
    *,
    uploads: dict[str, Path] | None = None,
    state_context: str | None = None,
) -> Callable[[], Lane]:
    """What makes a lane of this flow run."""
    options = context.options

    def open_lane() -> Lane:
        return Lane(
            context.provider,
            context.run_id,
            server=context.server_id,
            reuse=options.reuse_sandboxes,
            timeout=options.timeout,
            context=state_context,
            slots=slots,
            model_access=context.model_access,
            uploads=uploads,
        )

    return open_lane


def build_lane_executor(
    context: RunContext,
    slots: Slots,
    open_lane: Callable[[], Lane],
    *,
    ledger: Ledger,
    recorder: OutcomeRecorder,
    total: int,
    stop_on_failure: bool = False,
) -> LaneExecutor:
    """The executor of `total` executions in this process."""
    options = context.options
    per_task = options.executions_per_task or max(1, math.ceil(total / MAX_TASK_RUNS))
    return LaneExecutor(
        provider_name=context.provider.provider_name,
        open_lane=open_lane,
        lane_count=min(options.max_workers, math.ceil(total / per_task)),
        slots=slots,
        ledger=ledger,
        recorder=recorder,
        policy=build_retry_policy(context),
        deadline=context.deadline,
        executions_per_task=per_task,
        label=context.label,
        line_budget=LineBudget() if options.log_output else None,
        usage=context.usage,
        stop_on_failure=stop_on_failure,
    )


def build_retry_policy(context: RunContext) -> RetryPolicy:
    """Which errors of this flow run's executions are tried again."""
    options = context.options
    return RetryPolicy(options.retries, options.retry_code_errors, options.idempotent, context.deadline.at)


async def flush_ledger(ledger: Ledger) -> None:
    """Sees that all that was written is in the ledger. Raises OSError where a location does not take it."""
    await asyncio.to_thread(ledger.close)


async def flush_ledger_after_error(ledger: Ledger, log: Log) -> None:
    """The same where the run has failed: an OSError is logged, for the error that there is matters more."""
    try:
        await asyncio.shield(flush_ledger(ledger))
    except OSError as error:
        log.error("%s", error)


def get_flow_run_id() -> str:
    """The id of the flow run that this is called in."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("this must be called in a flow run")
    return str(context.flow_run.id)
