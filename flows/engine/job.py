"""One flow run: its parts, and the order in which they are opened and closed.

A run opens these parts in order, and closes them in reverse order:
1. the ledger, which the run claims so that a second writer gets a warning
2. the run's record in the ledger
3. the artifacts
4. the tracker of queries
5. the slots of the provider's limit
6. the executor, whose lanes open sandboxes

When a run is closed, its lanes delete their sandboxes and return their slots. The run waits for queries that are still
being recorded, and the provider deletes what it keeps for the run. The ledger is complete before the report is built,
and the record gets its end time. Each step runs even if an earlier step failed, and cancellation interrupts no step.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from ...sandbox.errors import ConfigurationError, NotRun
from ...sandbox.queries.recursive_model import DEFAULT_RECURSION
from ...tasks.capacity.slots import Slots
from ...tasks.execution import Execution, assign_keys
from ...tasks.host_tools import load_function
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.result_index import ResultCache, ResultIndex, get_results_root
from ...tasks.ledger.run_record import RunRecord
from ...tasks.ledger.shard_store import ShardStore
from ...tasks.tracing import set_run_totals
from ..listener import FlowListener, NotebookProgress, is_notebook
from ..plan import Outcomes, Plan
from ..reporting.summary import RunSummary
from ..run_state import RunState
from .artifacts import ArtifactPublisher
from .context import RunContext, open_capacity, open_run_context, resolve_provider_with_volume
from .executor import Executor, LaneExecutor, Sharding
from .failures import describe_rerun
from .outcome_sink import MemoryStore, OutcomeSink
from .run_outcome import build_run_outcome
from .termination import cancel_at_termination
from .turn_calls import TurnCalls


@dataclass(frozen=True, slots=True)
class Job:
    """An open flow run: the objects with which a flow executes its inputs."""

    plan: Plan
    context: RunContext
    store: MemoryStore | ShardStore
    sink: OutcomeSink
    cache: ResultCache
    slots: Slots
    executor: Executor
    record: RunRecord

    async def compute_fingerprint(self) -> dict[str, Any]:
        """Return the settings on which all results depend: provider, model, recursion, code around it, `collect`."""
        fingerprint = {**await self.context.provider.fingerprint()}
        access, preparation = self.context.model_access, self.context.preparation
        if access is not None:
            fingerprint["language_model"] = access.fingerprint()
        recursion = self.plan.recursion
        if recursion is not None and recursion != DEFAULT_RECURSION:
            answer_type = None if recursion.answer_type is None else recursion.answer_type.schema
            fingerprint["recursion"] = {**asdict(replace(recursion, answer_type=None)), "answer_type": answer_type}
        if preparation is not None:
            fingerprint["prepare"] = preparation.code
            if preparation.seed is not None:
                fingerprint["prepare_seed"] = preparation.seed
        if self.context.tools:
            fingerprint["tools"] = sorted(self.context.tools)
        if self.context.check is not None:
            fingerprint["check"] = self.context.check.code
        if self.context.options.collect:  # Earlier results lack the files.
            fingerprint["collect"] = sorted(self.context.options.collect)
        return fingerprint

    def skip(self, executions: Iterable[Execution], reason: str) -> None:
        """Fail the executions without an outcome, which never started. The ledger does not get these failures."""
        for execution in executions:
            if execution.index not in self.store:
                self.sink.record_unrun(execution, NotRun(f"not run: {reason}"))

    def collect_outcomes(self) -> Outcomes:
        """Return every outcome in order. Raises ConfigurationError if their number differs from that of the inputs."""
        results = self.store.outcomes
        if len(results) != self.context.total and not self.plan.may_stop_early:
            raise ConfigurationError(
                f"the inputs changed while they were read: {self.context.total} at first, {len(results)} at the "
                "end. Run it again"
            )
        return Outcomes(results, self.store.failures, str(self.context.ledger.path), self.plan.report_spec)


async def execute_items(job: Job) -> None:
    """Execute the items of the job's plan, in any order."""
    count_occurrence = job.store.count_occurrence if isinstance(job.store, ShardStore) else None
    fingerprint = await job.compute_fingerprint()
    plan = job.plan
    executions = assign_keys(plan.items, fingerprint, count_occurrence, plan.report_spec.repeats, plan.digests)
    await job.executor.execute_all(executions, job.cache.find_result)


@asynccontextmanager
async def open_job(plan: Plan, state: RunState, sharding: Sharding | None) -> AsyncIterator[Job]:
    """Open the current flow run's job, and close it at the end, also after an error.

    Args:
        plan: The run's plan.
        state: The run's state. The job does not repeat the checks that passed before the run started.
        sharding: Makes the executor of a job in shards; None for a job in this process.

    Raises:
        ConfigurationError: The provider, the model or the ledger cannot be used; nothing has run.
        OSError: The ledger cannot be written.
    """
    options, total = plan.options, plan.total
    with cancel_at_termination():
        log = get_run_logger()
        provider = state.provider or await resolve_provider_with_volume(options, plan.volume_name)
        if sharding is not None:
            environment = sharding.description
        else:
            if not state.environment:
                await provider.check()
            environment = state.environment or await provider.describe_sandboxes()
        is_own_ledger = options.results_path is None
        ledger = Ledger(options.locate_ledger(get_results_root() / flow_run.id))
        on_turn = (
            None if plan.on_turn is None else TurnCalls(await asyncio.to_thread(load_function, "on_turn", plan.on_turn))
        )
        context = await open_run_context(provider, options, plan.label, ledger, total, recursion=plan.recursion)
        # Shards check the model's first call on their own machines.
        if context.model_access is not None and sharding is None and not state.is_model_checked:
            await context.model_access.check_first_call(is_recursive=plan.recursion is not None)
        await asyncio.to_thread(ledger.create)
        state.results_path = str(ledger.path)
        log.info("%d execution%s %s; results in %s", total, "s" if total != 1 else "", environment, ledger.path)
        record = _make_record(plan, provider.provider_name, state.results_path, context.server_id)
        store = MemoryStore(total) if sharding is None else ShardStore(ledger=ledger, repeats=plan.report_spec.repeats)
        artifacts = ArtifactPublisher(record, log)
        if state.listener is None:
            state.listener = NotebookProgress(artifacts.describe_progress) if is_notebook() else FlowListener()
        sink = OutcomeSink(context, store, state.listener, artifacts, check_first=plan.check_first)
        state.listener.on_start(total, environment, state.results_path, plan.report_spec, record.name)
        if state.ui_url is not None:
            state.listener.on_page(f"{state.ui_url}/runs/flow-run/{flow_run.id}")
        await asyncio.to_thread(record.write)
        for warning in plan.warnings:
            sink.warn(warning)
        try:
            if not ledger.register_writer():
                text = f"another run is writing to {ledger.path}"
                if plan.is_sole_writer:
                    raise ConfigurationError(
                        f"{text}, and a search needs its ledger alone: wait until that run has ended"
                    )
                sink.warn(f"{text}: executions that both have are run twice")
            cache = await _open_cache(plan, context, store, is_own=is_own_ledger or flow_run.run_count > 1)
            async with artifacts, open_capacity(context) as slots:
                if sharding is None or isinstance(store, MemoryStore):
                    executor: Executor = LaneExecutor(
                        context=context,
                        slots=slots,
                        sink=sink,
                        find_uploads=plan.find_uploads,
                        state_context=plan.state_context,
                        stop_on_failure=plan.stop_on_failure,
                        turn_calls=on_turn,
                    )
                else:
                    executor = sharding.make_executor(context=context, store=store, sink=sink)
                yield Job(plan, context, store, sink, cache, slots, executor, record)
                _complete_record(record, context, artifacts.summary)
                if plan.may_stop_early and isinstance(store, MemoryStore):
                    record.total = len(store.outcomes)
                record.ended = time.time()
                # Close the ledger before the report is built, so that its last lines count too. Raises OSError.
                await asyncio.to_thread(ledger.close)
        except BaseException as error:
            await context.flush_ledger_after_error()
            if isinstance(error, asyncio.CancelledError):
                text = "interrupted; the results so far are in %s; %s to run the rest"
                log.warning(text, ledger.path, describe_rerun())
            elif isinstance(error, Pause):
                log.info("suspended; the results so far are in %s; resume the flow run to run the rest", ledger.path)
            raise
        finally:
            ledger.unregister_writer()
            _complete_record(record, context, artifacts.summary)
            await asyncio.shield(asyncio.to_thread(record.finish))
        sink.log_unlogged_failures()
        set_run_totals(total, artifacts.summary.failed, artifacts.summary.usage)
        state.outcome = build_run_outcome(record, artifacts.summary)
        log.info("%s", state.outcome.message)


def _make_record(plan: Plan, provider: str, results_path: str, server: str) -> RunRecord:
    """Return the record of this start of the flow run."""
    spec = plan.report_spec
    return RunRecord(
        flow=flow_run.flow_name,
        results_path=results_path,
        flow_run_id=flow_run.id,
        server=server,
        name=flow_run.name,
        what=spec.noun,
        objective=spec.objective,
        direction=spec.direction,
        objectives=[asdict(item) for item in spec.objectives] if len(spec.objectives) > 1 else [],
        space=spec.space,
        constraints=list(spec.constraints),
        search=plan.search,
        provider=provider,
        total=plan.total,
        repeats=None if spec.repeats is None else spec.repeats.count,
        groups=None if spec.repeats is None else spec.repeats.groups,
        aggregate=spec.aggregate,
        began=time.time(),
        column_types=plan.column_types,
    )


async def _open_cache(plan: Plan, context: RunContext, store: MemoryStore | ShardStore, *, is_own: bool) -> ResultCache:
    """Return the results of earlier runs: those of the ledger, and with `cache_results` those of every ledger.

    Args:
        plan: The run's plan.
        context: The run's context.
        store: The store of the run's outcomes.
        is_own: The ledger has only this run's own executions.
    """
    ledger = context.ledger
    index = ResultIndex(get_results_root()) if plan.options.cache_results else None
    if index is not None:
        index.refresh()
    if isinstance(store, ShardStore):
        return ResultCache(ledger, store.find_previous_line, index)
    lines = await asyncio.to_thread(ledger.load_latest_lines)
    if plan.state_context is None:  # With shared state, results of some executions are of no use.
        count = sum(line.is_success for line in lines.values())
        if count and is_own:
            context.log.info("%d kept, %d to run", count, max(0, plan.total - count))
        elif count:
            context.log.info("the ledger has %d results of earlier runs: those of equal executions are kept", count)
    in_order = sorted(lines.values(), key=lambda line: line.written_at)
    latest_keys = {line.data["index"]: line.key for line in in_order if line.data.get("index") is not None}
    return ResultCache(ledger, lambda key: lines.pop(key, None), index, latest_keys)


def _complete_record(record: RunRecord, context: RunContext, summary: RunSummary) -> None:
    """Put the use of sandboxes, the counts of outcomes and the best score into the record."""
    record.sandboxes, record.sandbox_seconds = context.usage.sandboxes, context.usage.sandbox_seconds
    record.succeeded, record.failed = summary.succeeded, summary.failed
    best = summary.best
    if record.objectives:
        record.front = len(best.results)
    elif best.result is not None and best.score is not None and math.isfinite(best.score):
        record.best, record.best_index = float(best.score), best.result.meta.index
