"""One flow run: what it consists of, and in which order that is opened and closed.

Opened in this order, and closed in the reverse one: the ledger (claimed, so that a second writer is warned), the run's
record in it, the artifacts, the tracker of queries, the slots of the provider's limit, and the executor, whose lanes
open sandboxes. At the end the lanes have removed their sandboxes, slots are given back, queries that are still being
recorded are waited for, what was written is in the ledger before the report is made of it, and the record has its end.
Each step is taken whatever the one before it raised, and none is cut short by a cancellation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError, NotRun
from ...tasks.execution import Execution, assign_keys
from ...tasks.lane import Lane
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.result_index import ResultIndex, get_results_root
from ...tasks.ledger.run_record import ReportSpec, RunRecord
from ...tasks.ledger.shard_store import ShardStore
from ..parameters import Options
from ..sharding.coordinator import ShardingExecutor
from ..sharding.planner import plan_shards
from .artifacts import ArtifactPublisher
from .context import (
    Label,
    RunContext,
    build_lane_executor,
    flush_ledger,
    flush_ledger_after_error,
    get_flow_run_id,
    make_lane_factory,
    open_capacity,
    open_run_context,
)
from .events import EventPublisher, find_listener
from .executor import Executor, FindResult
from .failures import Outcomes
from .outcome_store import MemoryStore, OutcomeRecorder, OutcomeStore
from .result_cache import MemoryLines, ResultCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An open flow run: what a flow executes its inputs with."""

    context: RunContext
    total: int
    ledger: Ledger
    recorder: OutcomeRecorder
    cache: ResultCache
    executor: Executor
    open_lane: Callable[[], Lane]
    count_occurrence: Callable[[bytes], int] | None = None  # of identical executions; None to count in memory

    @property
    def store(self) -> OutcomeStore:
        """The outcomes so far."""
        return self.recorder.store

    async def compute_fingerprint(self) -> dict[str, Any]:
        """What every result of this run depends on: the provider's fingerprint, and the model's where there is one."""
        fingerprint = await self.context.provider.fingerprint()
        access = self.context.model_access
        return fingerprint if access is None else {**fingerprint, "language_model": access.model.fingerprint()}

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult | None = None) -> None:
        """Executes what has no result yet; see `Executor`. By default `find_result` is the cache's."""
        await self.executor.execute_all(executions, find_result=find_result or self.cache.find_result)

    def skip(self, executions: Iterable[Execution], reason: str) -> None:
        """Fails those without an outcome, which are not started because of others. No ledger has them."""
        for execution in executions:
            if execution.index not in self.store:
                self.recorder.record_failure_before_start(execution, NotRun(f"not run: {reason}"))

    def collect_outcomes(self) -> Outcomes:
        """Every outcome, in order. Raises ConfigurationError where there are not as many as there were inputs."""
        results = self.store.outcomes
        if len(results) != self.total:
            raise ConfigurationError(
                f"the inputs changed while they were read: {self.total} at first, {len(results)} at the end"
            )
        return Outcomes(results, self.store.failures, str(self.ledger.path))


async def execute_items(
    items: Iterable[tuple[str, dict[str, Any]]],
    *,
    total: int,
    provider: SandboxProvider,
    options: Options,
    label: Label,
    uploads: dict[str, Path] | None = None,
    report_spec: ReportSpec | None = None,
) -> Outcomes:
    """The outcomes of pairs of code and variables, in a flow run that is opened for them; see `open_job`."""
    async with open_job(
        provider, total=total, options=options, label=label, uploads=uploads, report_spec=report_spec
    ) as job:
        await job.execute_all(assign_keys(items, await job.compute_fingerprint(), job.count_occurrence))
        return job.collect_outcomes()


@asynccontextmanager
async def open_job(
    provider: SandboxProvider,
    *,
    total: int,
    options: Options,
    label: Label,
    report_spec: ReportSpec | None = None,
    uploads: dict[str, Path] | None = None,
    state_context: str | None = None,
    stop_on_failure: bool = False,
) -> AsyncIterator[Job]:
    """An open job of the flow run that this is called in, for `total` executions.

    `label` names an execution's task run; `report_spec` says what the report calls executions; `uploads` are files that
    each execution finds, by their paths there. With a `state_context` all executions share one process and its state;
    with `stop_on_failure` none is started after one that failed.
    Raises ConfigurationError before anything runs, and OSError where the ledger cannot be written.
    """
    log = get_run_logger()
    plan = None if options.shards is None else await plan_shards(options.shards, total, log)
    environment = f"isolation: {await provider.check()}" if plan is None else plan.description
    ledger = Ledger(options.results_path or get_results_root() / get_flow_run_id())
    context = await open_run_context(provider, options, label)
    await asyncio.to_thread(ledger.create)
    log.info("%d executions on %s; %s; results in %s", total, provider.provider_name, environment, ledger.path)
    record = _create_record(report_spec or ReportSpec(), ledger, provider.provider_name, total)
    artifacts = ArtifactPublisher(record, log)
    events = EventPublisher(log, label=label, listener=find_listener(), artifacts=artifacts)
    events.publish_start(total, environment, str(ledger.path))
    await asyncio.to_thread(record.write)
    shard_store = None if plan is None else ShardStore(ledger=ledger)
    store = MemoryStore(total) if shard_store is None else shard_store
    try:
        if not ledger.register_writer():
            events.publish_warning(
                f"another run is writing to {ledger.path} at this moment: what both have to do is done twice"
            )
        previous = shard_store
        if previous is None:
            previous = MemoryLines(await asyncio.to_thread(ledger.load_latest_lines))
        index = _open_index() if options.cache_results else None
        recorder = OutcomeRecorder(store, events, provider_name=provider.provider_name)
        async with artifacts, open_capacity(context) as slots:
            open_lane = make_lane_factory(context, slots, uploads=uploads, state_context=state_context)
            executor: Executor
            if plan is None or shard_store is None:
                executor = build_lane_executor(
                    context,
                    slots,
                    open_lane,
                    ledger=ledger,
                    recorder=recorder,
                    total=total,
                    stop_on_failure=stop_on_failure,
                )
            else:
                executor = ShardingExecutor(
                    plan,
                    context,
                    store=shard_store,
                    ledger=ledger,
                    recorder=recorder,
                    total=total,
                    run_name=record.name,
                    noun=record.what,
                )
            yield Job(
                context=context,
                total=total,
                ledger=ledger,
                recorder=recorder,
                cache=ResultCache(ledger, previous, index),
                executor=executor,
                open_lane=open_lane,
                count_occurrence=None if shard_store is None else shard_store.count_occurrence,
            )
            _count_sandboxes(record, context)
            record.ended = time.time()
            await flush_ledger(ledger)  # before it is reported
    except BaseException:
        await flush_ledger_after_error(ledger, log)
        raise
    finally:
        ledger.unregister_writer()
        _count_sandboxes(record, context)
        await asyncio.shield(asyncio.to_thread(record.finish))
    log.info("%d of %d executions succeeded; results in %s", total - len(store.failures), total, ledger.path)


def _open_index() -> ResultIndex:
    index = ResultIndex(get_results_root())
    index.refresh()
    return index


def _count_sandboxes(record: RunRecord, context: RunContext) -> None:
    record.sandboxes, record.sandbox_seconds = context.usage.sandboxes, context.usage.sandbox_seconds


def _create_record(spec: ReportSpec, ledger: Ledger, provider: str, total: int) -> RunRecord:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return RunRecord(
        flow=context.flow_run.name if context.flow is None else context.flow.name,
        results_path=str(ledger.path),
        flow_run_id=str(context.flow_run.id),
        name=context.flow_run.name,
        what=spec.noun,
        objective=spec.objective,
        direction=spec.direction,
        provider=provider,
        total=total,
        began=time.time(),
    )
