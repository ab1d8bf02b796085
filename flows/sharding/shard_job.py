"""The job of one shard, executed like any other; its outcomes are its parent's, which reads them from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.shard_files import ShardHeader
from ..engine.context import (
    RunContext,
    build_lane_executor,
    flush_ledger,
    flush_ledger_after_error,
    make_lane_factory,
    open_capacity,
    open_run_context,
)
from ..engine.events import EventPublisher
from ..engine.executor import LaneExecutor
from ..engine.labels import LABELS, execution_label
from ..engine.outcome_store import CountingStore, OutcomeRecorder
from ..engine.result_cache import MemoryLines, ResultCache
from ..parameters import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """An open job of one shard."""

    context: RunContext
    store: CountingStore
    cache: ResultCache
    executor: LaneExecutor


@asynccontextmanager
async def open_shard_job(provider: SandboxProvider, header: ShardHeader, options: Options) -> AsyncIterator[ShardJob]:
    """A job of what the header says, with the ledger of its parent open. Raises ConfigurationError."""
    isolation = await provider.check()
    assert options.results_path is not None
    ledger = Ledger(options.results_path, header.part_prefix)
    try:
        await asyncio.to_thread(ledger.create)
    except ConfigurationError as error:
        raise OSError(str(error)) from error  # of this worker, or for now: the parent could make it
    label = LABELS.get(header.what, execution_label)
    context = await open_run_context(provider, options, label)
    previous = MemoryLines(await asyncio.to_thread(ledger.load_latest_lines, header.part_prefix))
    context.log.info(
        "shard %d of %d: %d executions on %s: %s; results in %s",
        header.shard + 1,
        header.shards,
        header.total,
        provider.provider_name,
        isolation,
        ledger.path,
    )
    store = CountingStore()
    recorder = OutcomeRecorder(store, EventPublisher(context.log, label=label), provider_name=provider.provider_name)
    try:
        async with open_capacity(context) as slots:
            open_lane = make_lane_factory(context, slots)
            executor = build_lane_executor(
                context, slots, open_lane, ledger=ledger, recorder=recorder, total=header.total
            )
            yield ShardJob(context=context, store=store, cache=ResultCache(ledger, previous), executor=executor)
    except BaseException:
        await flush_ledger_after_error(ledger, context.log)
        raise
    await flush_ledger(ledger)
