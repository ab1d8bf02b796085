"""The executor of a job in shards: each shard is a run of the shard deployment.

Prefect schedules and runs the shards, and the executor combines them into one job. Every second the executor reads the
new lines of the ledger, the states of the shards' runs and their heartbeats. If a shard ends without all of its
outcomes, or stops sending heartbeats, the executor starts it again with the remaining executions.
"""

import asyncio
import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import httpx
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run

from ...sandbox.errors import ConfigurationError, NotRun, PrepareError, RlmBatchError
from ...sandbox.queries.budget import Usage
from ...tasks.execution import Execution
from ...tasks.ledger.ledger import LedgerLine
from ...tasks.ledger.shard_files import ShardHeader, find_last_attempts, load_or_create_cut
from ...tasks.ledger.shard_store import ShardStore
from ..engine.context import RunContext
from ..engine.executor import FindResult
from ..engine.outcome_sink import OutcomeSink
from ..parameters import MAX_TASK_RUNS, Options
from .heartbeat import HEARTBEAT_TIMEOUT_SECONDS
from .shard_runs import AttemptRuns, Shard
from .work_pool import ShardPlan, open_server_client

POLL_INTERVAL_SECONDS = 1.0
IDLE_WARNING_SECONDS = 60.0  # The job warns if no shard has run for so long.
CANCEL_TIMEOUT_SECONDS = 20.0  # A worker kills a run that waits for cancelled shards for 30 s.
MAX_FRUITLESS_ATTEMPTS = 3  # Then the executor gives up the shard: attempts in a row without any outcome.
MAX_JOB_TASK_RUNS = 10_000  # task runs of all shards together, unless `executions_per_task` is set
LEDGER_PAGE_LINES = 5000
MAX_OUTAGE_SECONDS = 300.0  # If the server or the ledger does not answer for so long, the job fails.


@dataclass(slots=True, kw_only=True)
class ShardingExecutor:
    """An executor that runs a job's executions in shards, and adds the shards' usage to the context.

    Attributes:
        store: The job's executions, and their outcomes so far.
        noun: The job's word for an execution.
    """

    plan: ShardPlan
    context: RunContext
    store: ShardStore
    sink: OutcomeSink
    noun: str
    _read_new_lines: Callable[[], Iterator[LedgerLine]] | None = None
    _polled_at: float = 0.0  # the time of the last poll, by the event loop's clock
    _outages: dict[str, float] = field(default_factory=dict[str, float])  # the beginning of each outage
    _shards: list[Shard] = field(default_factory=list[Shard])
    _active: dict[int, Shard] = field(default_factory=dict[int, Shard])

    @property
    def is_over(self) -> bool:
        return self.sink.failures.is_limit_reached

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        ledger_id, job_id = await self._add_executions(executions, find_result)
        async with open_server_client() as client:
            deployment_id = self.plan.work_pool.deployment_id
            runs = AttemptRuns(client, deployment_id, self.context.ledger.path, ledger_id, job_id)
            limit = asyncio.timeout_at(self.context.deadline.at)
            try:
                async with limit:
                    await self._run_shards(runs)
            except TimeoutError:
                await self._cancel_active(runs)
                if not limit.expired():
                    raise
                await self._fail_unfinished(
                    self._shards, self._build_deadline_error("passed before this execution had ended")
                )
            except BaseException:
                # If the job ends, its shards end too. They continue only if the job's process is killed.
                await asyncio.shield(self._cancel_active(runs))
                raise
        usage = self.context.usage
        for beat in (beat for shard in self._shards for beat in shard.ended_heartbeats):
            usage.sandboxes += beat.sandboxes
            usage.sandbox_seconds += beat.sandbox_seconds
            usage.model += Usage(beat.calls, beat.prompt_tokens, beat.completion_tokens, beat.cost)

    async def _add_executions(self, executions: Iterator[Execution], find_result: FindResult) -> tuple[str, str]:
        """Add all executions and their earlier results to the store, and cut the job into shards.

        A job that is already in the ledger gets the same shards as before. Returns the ids of the ledger and the job.
        """
        if self._read_new_lines is None:
            self._read_new_lines = self.context.ledger.follow_lines()
            async for line in self._read_news():
                self.store.add_previous_line(line)
        keys = hashlib.sha256()
        first, count = 0, 0
        for execution in executions:
            first = execution.index if not count else first
            count += 1
            keys.update(execution.key.encode())
            result = find_result(execution)
            self.store.add_execution(execution)
            if result is not None:
                self.store.record_previous_result(execution)
                self.sink.record_cached(execution, result, is_stored=True)
                self.sink.raise_error()
            if count % 500 == 0:
                await asyncio.sleep(0)  # A million executions take half a minute, and Ctrl-C must work meanwhile.
        job_id = hashlib.sha256(f"{keys.hexdigest()} {first}".encode()).hexdigest()[:12]
        shard_count = min(self.plan.shard_count, count)
        cut = await asyncio.to_thread(
            load_or_create_cut, self.context.ledger.path, job_id, math.ceil(count / shard_count)
        )
        starts = range(first, first + count, cut.shard_size)
        self._shards = [
            Shard(number, start, min(start + cut.shard_size, first + count)) for number, start in enumerate(starts)
        ]
        self._active = {}
        if len(self._shards) != shard_count:
            self.context.log.info("the job continues in its earlier %d shards", len(self._shards))
        return cut.ledger_id, job_id

    async def _read_news(self) -> AsyncIterator[LedgerLine]:
        """Yield the lines that the ledger has gained since the last call."""
        assert self._read_new_lines is not None
        new = self._read_new_lines()
        while lines := await asyncio.to_thread(lambda: list(itertools.islice(new, LEDGER_PAGE_LINES))):
            for line in lines:
                yield line
            await asyncio.sleep(0)

    async def _gather_outcomes(self) -> None:
        """Record the outcomes that the ledger has gained."""
        async for line in self._read_news():
            outcome = self.store.record_line(line)
            if outcome is not None:
                index = outcome.meta.index or 0
                self.sink.record_gathered(Execution(index, "", outcome.meta.variables, ""), outcome)

    async def _run_shards(self, runs: AttemptRuns) -> None:
        """Start the shards, and watch them until all executions have an outcome."""
        await self._adopt_attempts(runs)
        waiting = [shard for shard in reversed(self._shards) if shard.number not in self._active]
        clock, pool = asyncio.get_running_loop().time, self.plan.work_pool
        counted_at = running_at = self._polled_at = clock()
        while True:
            if self.sink.failures.is_limit_reached:
                await self._cancel_active(runs)
                break
            await self._start_waiting(runs, waiting)
            if not self._active and not waiting:
                break
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            await self._poll_shards(runs, self._active)
            try:
                await self._gather_outcomes()
                for shard in list(self._active.values()):
                    if await self._has_ended(runs, shard):
                        del self._active[shard.number]
                        if self._count_unfinished(shard):
                            waiting.append(shard)
                self._outages.pop("ledger", None)
            except OSError as error:  # The location may answer again.
                self._note_outage("ledger", error)
            self.sink.raise_error()
            now = clock()
            if any(shard.heartbeat is not None for shard in self._active.values()) or not self._active:
                running_at = now
            if now - counted_at >= HEARTBEAT_TIMEOUT_SECONDS / 2 and pool.needs_workers:
                with suppress(httpx.HTTPError):
                    counted_at, self.plan.online_workers = now, await pool.count_online_workers(runs.client)
            if now - running_at >= IDLE_WARNING_SECONDS:
                running_at = now
                self.sink.warn(self._describe_idle_pool())
        await asyncio.to_thread(self.context.ledger.close)  # writes the results that came from other ledgers
        await self._gather_outcomes()
        self.sink.raise_error()
        if self.sink.failures.is_limit_reached:
            await self._fail_unfinished(self._shards, self.sink.failures.build_error)

    async def _adopt_attempts(self, runs: AttemptRuns) -> None:
        """Take over the flow runs of an earlier process of this job that are still running."""
        last_attempts = await asyncio.to_thread(find_last_attempts, self.context.ledger.path, runs.job_id)
        for shard in self._shards:
            shard.attempt = last_attempts.get(shard.number, 0)
            if shard.attempt and self._count_unfinished(shard):
                run = await runs.find_unfinished(shard)
                if run is not None:
                    self.context.log.info(
                        "shard %d is already running: the job takes over its run %s", shard.number + 1, run.name
                    )
                    shard.watch(runs.locate_files(shard), run)
                    shard.unfinished_at_start = self._count_unfinished(shard)
                    shard.is_adopted = True
                    self._active[shard.number] = shard

    async def _start_waiting(self, runs: AttemptRuns, waiting: list[Shard]) -> None:
        """Start waiting shards, the last first, while there is room for them."""
        while waiting and len(self._active) < self.plan.compute_max_active():
            shard = waiting.pop()
            if self._count_unfinished(shard):
                self._active[shard.number] = shard  # Set first, so that the end of the job finds the shard.
                try:
                    await self._start_attempt(runs, shard)
                except (httpx.HTTPError, OSError) as error:  # This may be temporary.
                    del self._active[shard.number]
                    waiting.append(shard)
                    shard.attempt -= 1
                    self._note_outage("start", error)
                    return
                self._outages.pop("start", None)

    def _note_outage(self, name: str, error: Exception) -> None:
        """Note a failed request. Raises the error once the outage has lasted for MAX_OUTAGE_SECONDS."""
        now = asyncio.get_running_loop().time()
        if now - self._outages.setdefault(name, now) > MAX_OUTAGE_SECONDS:
            raise error

    def _describe_idle_pool(self) -> str:
        pool = self.plan.work_pool.name
        if not self.plan.online_workers and self.plan.work_pool.needs_workers:
            return f"no shard is running, because the work pool {pool} has no worker: start one"
        return (
            f"no shard has run for {IDLE_WARNING_SECONDS:.0f} s, although the work pool {pool} has a "
            "worker: if a worker runs this job too, its --limit has to be at least 2"
        )

    def _count_unfinished(self, shard: Shard) -> int:
        return self.store.count_unfinished(shard.start, shard.stop)

    async def _start_attempt(self, runs: AttemptRuns, shard: Shard) -> None:
        shard.attempt += 1
        files = shard.files = runs.locate_files(shard)
        shard.run_id = shard.state = shard.heartbeat = None
        shard.is_adopted = shard.is_deleted = False
        shard.unfinished_at_start = self._count_unfinished(shard)
        header = ShardHeader(
            shards=len(self._shards),
            total=shard.unfinished_at_start,
            what=self.noun,
            commit=await self.context.provider.commit(),
        )
        suffix = f", attempt {shard.attempt}" if shard.attempt > 1 else ""
        run = await runs.start(
            files,
            header,
            self.store.iterate_unfinished(shard.start, shard.stop),
            name=f"{flow_run.name} {shard.number + 1} of {len(self._shards)}{suffix}",
            options=asdict(self._build_options(shard)),
            volume_name=self.context.provider.volume_name,
            files_digest=await self.context.provider.compute_files_digest(),
        )
        shard.watch(files, run)

    def _build_options(self, shard: Shard) -> Options:
        """Return the job's parameters for one shard."""
        options = self.context.options
        remaining = self.context.deadline.remaining_seconds()
        # Earlier rounds of this job, such as the chunks before their reduction, have used a part of the limits.
        used, ended = self.context.usage.model, shard.ended_heartbeats
        spent = sum(
            (Usage(beat.calls, beat.prompt_tokens, beat.completion_tokens, beat.cost) for beat in ended), Usage()
        )

        def divide(limit: float | None, used: float, spent: float) -> float | None:
            return None if limit is None else max(0.0, (limit - used) / len(self._shards) - spent)

        calls = divide(options.max_total_llm_calls, used.calls, spent.calls)
        tokens = divide(options.max_total_llm_tokens, used.tokens, spent.tokens)
        per_task = math.ceil(max(self.context.total / MAX_JOB_TASK_RUNS, shard.unfinished_at_start / MAX_TASK_RUNS))
        return replace(
            options,
            prepare=None if self.context.preparation is None else self.context.preparation.code,
            check=None if self.context.check is None else self.context.check.code,
            on_failure="return",
            max_failures=self.sink.failures.limit,
            deadline=None if remaining is None else max(1.0, remaining),
            executions_per_task=options.executions_per_task or per_task,
            cache_results=False,
            results_path=str(self.context.ledger.path),
            shards=None,
            max_total_llm_calls=None if calls is None else int(calls),
            max_total_llm_tokens=None if tokens is None else int(tokens),
            max_cost=divide(options.max_cost, used.cost or 0.0, spent.cost or 0.0),
        )

    async def _poll_shards(self, runs: AttemptRuns, shards: dict[int, Shard]) -> None:
        """Read the states and the heartbeats of these shards."""
        clock = asyncio.get_running_loop().time
        try:
            await runs.poll_states(shards.values())
            self._outages.pop("server", None)
        except httpx.HTTPError as error:
            self._note_outage("server", error)
        # A gap between polls, while the server or the ledger did not answer, does not count as a shard's silence.
        now, polled_at, self._polled_at = clock(), self._polled_at, clock()
        if now - polled_at > HEARTBEAT_TIMEOUT_SECONDS / 6:
            for shard in shards.values():
                shard.changed_at += now - polled_at
        for shard in shards.values():
            assert shard.files is not None
            heartbeat = await asyncio.to_thread(shard.files.read_heartbeat)
            if heartbeat is not None and (shard.heartbeat is None or heartbeat.count != shard.heartbeat.count):
                shard.heartbeat, shard.changed_at = heartbeat, now

    async def _has_ended(self, runs: AttemptRuns, shard: Shard) -> bool:
        """Return whether an attempt has ended, or counts as dead. Raises an error that ends the whole job."""
        state = shard.state
        if shard.is_deleted:
            await self._settle_attempt(shard, "its flow run was deleted")
            return True
        if state is not None and state.is_final():
            assert shard.files is not None
            shard.heartbeat = await asyncio.to_thread(shard.files.read_heartbeat) or shard.heartbeat
            await self._gather_last_outcomes(shard)
            error = shard.heartbeat.error if shard.heartbeat is not None else None
            message = f"{error[0]}: {error[1]}" if error is not None else state.message or state.name
            await self._settle_attempt(shard, f"{state.name}: {message}" if message != state.name else message)
            return True
        # Use the time of the poll, because the outcomes of another shard may have taken a minute since then.
        silence = self._polled_at - shard.changed_at
        start_timeout = self.plan.work_pool.start_timeout_seconds
        timeout = HEARTBEAT_TIMEOUT_SECONDS if shard.heartbeat is not None else start_timeout
        if "server" not in self._outages and shard.has_started and silence > timeout:
            await runs.report_crash(shard, "its process or worker ended: no sign of life")
            await self._settle_attempt(shard, f"no sign of life for {silence:.0f} s")
            return True
        return False

    async def _gather_last_outcomes(self, shard: Shard) -> None:
        """Record all that a finished attempt has written. A network file system may show it late."""
        give_up_at = asyncio.get_running_loop().time() + HEARTBEAT_TIMEOUT_SECONDS
        while True:
            await self._gather_outcomes()
            gathered = shard.unfinished_at_start - self._count_unfinished(shard)
            written = shard.heartbeat.done if shard.heartbeat is not None else 0
            if shard.is_adopted or gathered >= written or asyncio.get_running_loop().time() >= give_up_at:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _settle_attempt(self, shard: Shard, reason: str) -> None:
        """Decide whether the rest of an ended attempt is run again or fails. Raises an error that ends the job."""
        unfinished = self._count_unfinished(shard)
        heartbeat, number = shard.heartbeat, shard.number + 1
        if heartbeat is not None:
            shard.ended_heartbeats.append(heartbeat)
        shard.fruitless_attempts = 0 if unfinished < shard.unfinished_at_start else shard.fruitless_attempts + 1
        if not unfinished or self.sink.failures.is_limit_reached:
            return
        if heartbeat is not None and heartbeat.error is not None:
            for kind in (ConfigurationError, PrepareError):  # These would be raised on every worker.
                if heartbeat.error[0] == kind.__name__:
                    raise kind(f"shard {number}: {heartbeat.error[1]}")
        if heartbeat is not None and heartbeat.late:
            error = self._build_deadline_error("is over before the provider opens more sandboxes")
            await self._fail_unfinished([shard], error)
        elif shard.state is not None and shard.state.type == StateType.CANCELLED:
            await self._give_up(shard, f"its shard, number {number}, was cancelled")
        elif shard.fruitless_attempts >= MAX_FRUITLESS_ATTEMPTS:
            times = MAX_FRUITLESS_ATTEMPTS
            await self._give_up(shard, f"its shard, number {number}, ended {times} times without a result: {reason}")
        else:
            text = "shard %d ended with %d executions left, and is started again: %s"
            self.context.log.warning(text, number, unfinished, reason)

    async def _give_up(self, shard: Shard, reason: str) -> None:
        await self._fail_unfinished([shard], lambda _: NotRun(f"not finished: {reason}"))

    async def _fail_unfinished(self, shards: list[Shard], build_error: Callable[[Execution], RlmBatchError]) -> None:
        """Record a failure for each execution without an outcome in consecutive shards."""
        for execution in self.store.iterate_unfinished(shards[0].start, shards[-1].stop):
            self.sink.record_unrun(execution, build_error(execution))
            await asyncio.sleep(0)  # There may be many, and others use this event loop.

    def _build_deadline_error(self, reason: str) -> Callable[[Execution], RlmBatchError]:
        return partial(self.context.deadline.build_error, reason=reason)

    async def _cancel_active(self, runs: AttemptRuns) -> None:
        """Cancel the active shards, wait until they have ended, and record what they have written."""
        for shard in self._active.values():
            await runs.cancel(shard)
        give_up_at = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_SECONDS
        running = {number: shard for number, shard in self._active.items() if shard.run_id is not None}
        while running and asyncio.get_running_loop().time() < give_up_at:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            with suppress(httpx.HTTPError):
                await self._poll_shards(runs, running)
            running = {number: shard for number, shard in running.items() if not shard.has_ended}
        for shard in running.values():
            text = "shard %d was cancelled, and has not ended within %.0f s"
            self.context.log.warning(text, shard.number + 1, CANCEL_TIMEOUT_SECONDS)
        for shard in self._active.values():
            if shard.heartbeat is not None:
                shard.ended_heartbeats.append(shard.heartbeat)
        try:
            await asyncio.to_thread(self.context.ledger.close)
            await self._gather_outcomes()
        except OSError as error:  # The error that ends the job matters more.
            self.context.log.error("%s", error)
