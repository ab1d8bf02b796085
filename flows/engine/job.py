"""One flow run: what it consists of, and in which order that is opened and closed.

Opened in this order, and closed in the reverse one: the ledger (claimed, so that a second writer is warned), the run's
record in it, the artifacts, the tracker of queries, the slots of the provider's limit, and the executor, whose lanes
open sandboxes. At the end the lanes have removed their sandboxes, slots are given back, queries that are still being
recorded are waited for, what was written is in the ledger before the report is made of it, and the record has its end.
Each step is taken whatever the one before it raised, and none is cut short by a cancellation.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError, NotRun
from ...tasks.capacity.slots import Slots
from ...tasks.execution import Execution, assign_keys
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.result_index import ResultCache, ResultIndex, get_results_root
from ...tasks.ledger.run_record import ReportSpec, RunRecord
from ...tasks.ledger.shard_store import ShardStore
from ...tasks.tracing import set_run_totals
from ..inputs.host_paths import locate_ledger
from ..inputs.readers import RuleOfTypes
from ..parameters import Options
from ..sharding.coordinator import ShardingExecutor
from ..sharding.work_pool import plan_shards
from .artifacts import ArtifactPublisher
from .context import Label, Log, RunContext, open_capacity, open_run_context, resolve_provider_with_volume
from .events import FlowListener, announce_results_path, find_listener
from .executor import Executor, LaneExecutor
from .failures import Outcomes, describe_rerun
from .notebook_progress import NotebookProgress, is_notebook
from .outcome_sink import MemoryStore, OutcomeSink
from .run_outcome import announce_outcome
from .termination import cancel_at_termination


@dataclass(frozen=True, slots=True)
class Job:
    """An open flow run: what a flow executes its inputs with."""

    context: RunContext
    store: MemoryStore | ShardStore
    sink: OutcomeSink
    cache: ResultCache
    slots: Slots
    executor: Executor

    async def compute_fingerprint(self) -> dict[str, Any]:
        """What every result of this run depends on: the provider, and where there are any the model and `prepare`."""
        fingerprint = {**await self.context.provider.fingerprint()}
        access, preparation = self.context.model_access, self.context.preparation
        if access is not None:
            fingerprint["language_model"] = access.model.fingerprint()
        if preparation is not None:
            fingerprint["prepare"] = preparation.code
            if preparation.seed is not None:
                fingerprint["prepare_seed"] = preparation.seed
        if self.context.tools:
            fingerprint["tools"] = sorted(self.context.tools)
        if self.context.options.collect:  # or else a result from before would lack its files
            fingerprint["collect"] = sorted(self.context.options.collect)
        return fingerprint

    def skip(self, executions: Iterable[Execution], reason: str) -> None:
        """Fails those without an outcome, which are not started because of others. No ledger has them."""
        for execution in executions:
            if execution.index not in self.store:
                self.sink.record_unrun(execution, NotRun(f"not run: {reason}"))

    def collect_outcomes(self) -> Outcomes:
        """Every outcome, in order. Raises ConfigurationError where there are not as many as there were inputs."""
        results = self.store.outcomes
        if len(results) != self.context.total:
            raise ConfigurationError(
                f"the inputs changed while they were read: {self.context.total} at first, {len(results)} at the end"
            )
        return Outcomes(results, self.store.failures, str(self.context.ledger.path))


def locate_run_ledger(options: Options) -> PathOrLocation:
    """Where the current flow run's ledger is, or will be. Raises ConfigurationError."""
    return locate_ledger(options.results_path) if options.results_path else get_results_root() / flow_run.id


async def execute_items(
    items: Iterable[tuple[str, dict[str, Any]]],
    *,
    total: int,
    options: Options,
    label: Label,
    uploads: dict[str, Path] | None = None,
    report_spec: ReportSpec | None = None,
    is_recursive: bool = False,
    column_types: RuleOfTypes | None = None,
) -> Outcomes:
    """The outcomes of pairs of code and variables, in a flow run that is opened for them; see `open_job`."""
    async with open_job(
        total=total,
        options=options,
        label=label,
        uploads=uploads,
        report_spec=report_spec,
        is_recursive=is_recursive,
        column_types=column_types,
    ) as job:
        count_occurrence = job.store.count_occurrence if isinstance(job.store, ShardStore) else None
        executions = assign_keys(items, await job.compute_fingerprint(), count_occurrence)
        await job.executor.execute_all(executions, job.cache.find_result)
        return job.collect_outcomes()


@asynccontextmanager
async def open_job(
    *,
    total: int,
    options: Options,
    label: Label,
    volume_name: str | None = None,
    report_spec: ReportSpec | None = None,
    uploads: dict[str, Path] | None = None,
    state_context: str | None = None,
    stop_on_failure: bool = False,
    is_recursive: bool = False,
    is_sole_writer: bool = False,
    column_types: RuleOfTypes | None = None,
) -> AsyncIterator[Job]:
    """An open job of the flow run that this is called in, for `total` executions.

    `label` names an execution's task run; `report_spec` says what the report calls executions; `uploads` are files that
    each execution finds, by their paths there. With a `state_context` all executions share one process and its state;
    with `stop_on_failure` none is started after one that failed; with `is_sole_writer` a ledger that another run writes
    to is refused. All that is asked of a language model `is_recursive` where a recursive query is what is executed.
    `column_types` say how a file of inputs was read, for the run's record.
    Raises ConfigurationError before anything runs, and OSError where the ledger cannot be written.
    """
    with cancel_at_termination():
        log = get_run_logger()
        provider = await resolve_provider_with_volume(options, volume_name)
        plan = None if options.shards is None else await plan_shards(options.shards, total, log)
        environment = f"isolation: {await provider.check()}" if plan is None else plan.description
        ledger = Ledger(locate_run_ledger(options))
        context = await open_run_context(provider, options, label, ledger, total)
        if context.model_access is not None and plan is None:  # shards ask where the workers are
            await context.model_access.check_first_call(is_recursive=is_recursive)
        await asyncio.to_thread(ledger.create)
        announce_results_path(str(ledger.path))
        log.info("%d executions on %s; %s; results in %s", total, provider.provider_name, environment, ledger.path)
        spec = report_spec or ReportSpec()
        record = RunRecord(
            flow=flow_run.flow_name,
            results_path=str(ledger.path),
            flow_run_id=flow_run.id,
            name=flow_run.name,
            what=spec.noun,
            objective=spec.objective,
            direction=spec.direction,
            objectives=[asdict(objective) for objective in spec.objectives],
            space=spec.space,
            provider=provider.provider_name,
            total=total,
            began=time.time(),
            column_types=column_types or {},
        )
        store = MemoryStore(total) if plan is None else ShardStore(ledger=ledger)
        artifacts = ArtifactPublisher(record, log)
        listener = find_listener()
        if listener is None:
            listener = NotebookProgress(artifacts.describe_progress) if is_notebook() else FlowListener()
        sink = OutcomeSink(context, store, listener, artifacts)
        listener.on_start(total, environment, str(ledger.path))
        await asyncio.to_thread(record.write)
        try:
            if not ledger.register_writer():
                text = f"another run is writing to {ledger.path} at this moment"
                if is_sole_writer:
                    raise ConfigurationError(f"{text}, and a search has one writer: wait for its end")
                sink.warn(f"{text}: what both have to do is done twice")
            index = ResultIndex(get_results_root()) if options.cache_results else None
            if index is not None:
                index.refresh()
            if isinstance(store, ShardStore):
                cache = ResultCache(ledger, store.find_previous_line, index)
            else:
                lines = await asyncio.to_thread(ledger.load_latest_lines)
                if state_context is None:  # or else results of some are of no use
                    # One below the results root has this run's own executions, another those of earlier runs.
                    is_own = options.results_path is None or flow_run.run_count > 1
                    _log_previous_results(log, sum(line.is_success for line in lines.values()), total, is_own=is_own)
                cache = ResultCache(ledger, lambda key: lines.pop(key, None), index)
            async with artifacts, open_capacity(context) as slots:
                if plan is None or isinstance(store, MemoryStore):
                    executor: Executor = LaneExecutor(
                        context=context,
                        slots=slots,
                        sink=sink,
                        uploads=uploads,
                        state_context=state_context,
                        stop_on_failure=stop_on_failure,
                    )
                else:
                    executor = ShardingExecutor(plan=plan, context=context, store=store, sink=sink, noun=record.what)
                yield Job(context, store, sink, cache, slots, executor)
                _count_sandboxes(record, context)
                record.ended = time.time()
                await asyncio.to_thread(ledger.close)  # before it is reported; raises OSError where that cannot be done
        except BaseException as error:
            await context.flush_ledger_after_error()
            if isinstance(error, asyncio.CancelledError):
                told = "interrupted; the results so far are in %s; %s to run the rest"
                log.warning(told, ledger.path, describe_rerun())
            elif isinstance(error, Pause):
                log.info("suspended; the results so far are in %s; resume the flow run to run the rest", ledger.path)
            raise
        finally:
            ledger.unregister_writer()
            _count_sandboxes(record, context)
            await asyncio.shield(asyncio.to_thread(record.finish))
        sink.log_unlogged_failures()
        set_run_totals(total, artifacts.summary.failed, artifacts.summary.usage)
        log.info("%s", announce_outcome(record, artifacts.summary))


def _log_previous_results(log: Log, count: int, total: int, *, is_own: bool) -> None:
    """Tells of the results that the ledger has already: of this run's own executions, or of earlier runs."""
    if count and is_own:
        log.info("%d kept, %d to run", count, max(0, total - count))
    elif count:
        log.info("the ledger has %d results of earlier runs: those of equal executions are kept", count)


def _count_sandboxes(record: RunRecord, context: RunContext) -> None:
    record.sandboxes, record.sandbox_seconds = context.usage.sandboxes, context.usage.sandbox_seconds
