"""The opening of a flow run: its ledger, record, artifacts, tracker of queries, and slots.

They are closed in reverse order. Each of them is closed even if closing another one failed, and cancellation interrupts
no closing.
"""

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect.exceptions import Pause
from prefect.runtime import flow_run

from ...sandbox.errors import ConfigurationError
from ...tasks.capacity.slots import open_slots
from ...tasks.execution import assign_keys
from ...tasks.host_tools import load_function
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.result_index import ResultCache, ResultIndex, find_ended_lines, get_results_root
from ...tasks.ledger.run_record import Origin, RunRecord, list_run_records
from ...tasks.ledger.shards import ShardStore
from ...tasks.tracing import set_run_totals
from ..reporting.report import describe_usage
from ..reporting.summary import RunSummary
from ..sharding.coordinator import ShardingExecutor
from ..sharding.work_pool import plan_shards
from .artifacts import ArtifactPublisher
from .executor import LaneExecutor
from .failures import describe_rerun
from .origin import describe_origin
from .outcome_sink import MemoryStore, OutcomeSink
from .run import Run
from .turn_calls import TurnCalls


async def execute_items(run: Run) -> None:
    """Execute the items of the run's plan, in any order."""
    executions = assign_keys(
        run.plan.items,
        await run.compute_fingerprint(),
        run.store.count_occurrence if isinstance(run.store, ShardStore) else None,
        run.plan.report_spec.repeats,
        run.plan.digests,
        run.sink.warn,
    )
    await run.executor.execute_all(executions, run.cache.find_result)


@asynccontextmanager
async def open_run(run: Run) -> AsyncIterator[None]:
    """Open the current flow run, and close it at the end, also after an error.

    Raises:
        ConfigurationError: The ledger or the work pool of shards cannot be used; nothing has run.
        OSError: The ledger cannot be written.
    """
    run.message, run.report = "", None  # Prefect may have retried the flow run.
    await _start(run)
    log, ledger, record = run.log, run.ledger, run.record
    summary = run.summary = RunSummary(run.plan.report_spec)
    run.sink = OutcomeSink(run, [run.store.add_outcome])
    run.listener.on_start(run.plan.total, run.environment, str(ledger.path), summary, record.name)
    if run.ui_url is not None:
        page = f"{run.ui_url}/runs/flow-run/{run.run_id} (rlm-batch server shows how to sign in)"
        run.listener.on_page(page)
        log.info("Page: %s", page)
    await asyncio.to_thread(record.write)
    try:
        if not ledger.register_writer():
            text = f"another run is writing to {ledger.path}"
            if run.plan.search and run.options.shards is None:
                raise ConfigurationError(f"{text}, and a search needs its ledger alone: wait until that run has ended")
            run.sink.warn(f"{text}: executions that both have are run twice")
        run.cache = await _open_cache(run)
        async with ArtifactPublisher(record, summary, log), open_capacity(run):
            try:
                yield
            finally:
                await _complete_record(run, summary)
            if run.plan.may_stop_early and isinstance(run.store, MemoryStore):
                record.total = summary.done
            record.ended = time.time()
            # Close the ledger before `ArtifactPublisher` builds the report, because closing may fail.
            await asyncio.to_thread(ledger.close)
    except BaseException as error:
        await run.flush_ledger_after_error()
        if isinstance(error, asyncio.CancelledError):
            text = "interrupted; the results so far are in %s; %s to run the rest"
            log.warning(text, ledger.path, describe_rerun())
        elif isinstance(error, Pause):
            log.info("suspended; the results so far are in %s; resume the flow run to run the rest", ledger.path)
        raise
    finally:
        ledger.unregister_writer()
        await asyncio.shield(asyncio.to_thread(record.finish))
    set_run_totals(run.plan.total, summary.failed, summary.usage)
    run.message = f"{summary.describe(record.total)}; results in {record.results_path}"
    log.info("%s", run.message)


async def _start(run: Run) -> None:
    """Create the ledger, and choose the store and the executor: for this process, or for shards."""
    options, plan = run.options, run.plan
    await run.start(Ledger(options.locate_ledger(get_results_root() / flow_run.id)), flow_run.id)
    if options.shards is None:
        run.store, run.executor = MemoryStore(plan.total + 1), LaneExecutor(run)
    else:
        shard_plan = await plan_shards(options.shards, plan.total, run.log)
        run.environment = shard_plan.description
        run.store = ShardStore(ledger=run.ledger, total=plan.total, repeats=plan.report_spec.repeats)
        run.executor = ShardingExecutor(run, run.store, shard_plan)
    run.turn_calls = None
    if plan.on_turn is not None:
        run.turn_calls = TurnCalls(await asyncio.to_thread(load_function, "on_turn", plan.on_turn))
    await asyncio.to_thread(run.ledger.create)
    run.results_path = str(run.ledger.path)
    noun = "execution" if plan.total == 1 else "executions"
    run.log.info("%d %s %s; results in %s", plan.total, noun, run.environment, run.ledger.path)
    run.record = _make_record(run, await describe_origin(run))


@asynccontextmanager
async def open_capacity(run: Run) -> AsyncIterator[None]:
    """Open the slots of the provider's limit. Track queries in the context, and log the usage of models at its end.

    Raises OSError if the answers of earlier runs cannot be read.
    """
    if run.answers is not None:
        await asyncio.to_thread(run.answers.load)
    try:
        async with run.tracker, open_slots(run.provider, run.run_id, run.log) as slots:
            run.slots = slots
            yield
    finally:
        for writer in (run.answers, run.transcripts):
            if writer is not None:
                await asyncio.shield(asyncio.to_thread(writer.close))
        access = run.model_access
        if access is not None:
            usage = access.spent.usage + run.usage.model
            run.log.info("the model was called %s", describe_usage(usage, access.cache.hits if access.cache else 0))


def _make_record(run: Run, origin: Origin) -> RunRecord:
    """Return the record of this start of the flow run."""
    plan = run.plan
    return RunRecord(
        flow=flow_run.flow_name,
        results_path=str(run.ledger.path),
        flow_run_id=run.run_id,
        name=flow_run.name,
        search=plan.search,
        judged_run=plan.judged_run,
        provider=run.provider.provider_name,
        total=plan.total,
        began=time.time(),
        tags=list(flow_run.tags),
        origin=origin,
        key_version=run.key_version,
        **plan.report_spec.build_record_fields(),
    )


async def _open_cache(run: Run) -> ResultCache:
    """Return the results of earlier runs: those of the ledger, and with `cache_results` those of every ledger."""
    index = None
    if run.options.cache_results:
        index = ResultIndex(get_results_root())
        index.refresh()
    if run.provider.environment:
        await asyncio.to_thread(_warn_of_old_keys, run)
    if isinstance(run.store, ShardStore):
        return ResultCache(run.ledger, {}, index)  # The executor reads this ledger itself.
    lines = await asyncio.to_thread(run.ledger.load_latest_lines)
    count = sum(line.is_success for line in lines.values())
    # With shared state, the results of single executions are of no use.
    if count and run.plan.state_context is None:
        is_same_job = run.options.results_path is None or flow_run.run_count > 1
        if is_same_job:
            run.log.info("%d kept, %d to run", count, max(0, run.plan.total - count))
        else:
            run.log.info("the ledger has %d results of earlier runs: those of equal executions are kept", count)
    latest_keys: dict[int, str] = {}
    for line in sorted(lines.values(), key=lambda line: line.written_at):
        if line.data.get("index") is not None:
            latest_keys[line.data["index"]] = line.key
    ended_lines = {} if run.check is None else find_ended_lines(lines.values())
    has_files, warn_once = bool(run.options.collect), functools.cache(run.sink.warn)
    return ResultCache(
        run.ledger, lines, index, run.check, has_files, warn_once, ended_lines, latest_keys, run.plan.recursion
    )


def _warn_of_old_keys(run: Run) -> None:
    """Warn if the last run on the ledger had another version of keys, so this run with an environment finds nothing."""
    earlier = [record for record in list_run_records(run.ledger.path) if record.id != run.record.id]
    if earlier and earlier[-1].key_version < 2:
        run.sink.warn(
            f"the results in {run.ledger.path} are from a version that ignored `environment`: all executions run again"
        )


async def _complete_record(run: Run, summary: RunSummary) -> None:
    """Set the fields of the record that are known at the end of the run."""
    record = run.record
    best, score = summary.best, summary.best.score
    record.sandboxes, record.sandbox_seconds = run.usage.sandboxes, run.usage.sandbox_seconds
    record.succeeded, record.failed = summary.succeeded, summary.failed
    if record.origin is not None:
        versions = await asyncio.to_thread(run.provider.list_versions)
        record.origin.facts["Python and packages"] = ", ".join(versions) or "those of the sandboxes"
    if record.objectives:
        record.front = len(best.results)
        return
    if best.result is None or score is None:
        return
    if math.isfinite(score):
        record.best, record.best_index = float(score), best.result.meta.index
