"""The executor of a job in shards: each shard is a run of the shard deployment.

Prefect schedules and runs the shards, and the executor combines them into one job. Every second the executor reads the
new lines of the ledger and the states of the shards' runs. If a shard ends without all of its outcomes, or sends no
heartbeats, the executor starts it again with the remaining executions. A job that is run again on its ledger cancels
the shards of its earlier runs, and cuts what the ledger lacks into new shards.
"""

import asyncio
import hashlib
import itertools
import math
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, DeadlineExceeded, NotRun, PrepareError, RlmBatchError
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Outcome
from ...tasks.execution import Execution
from ...tasks.ledger.ledger import LedgerLine
from ...tasks.ledger.run_record import list_run_records
from ...tasks.ledger.shards import ShardFiles, ShardHeader, ShardStore
from ..engine.executor import FindResult
from ..engine.run import Run
from ..orphans import read_flow_runs
from ..parameters import MAX_TASK_RUNS, Options
from .shard_runs import HEARTBEAT_SECONDS, Shard, cancel_runs, look_for_heartbeats, poll_states
from .work_pool import ShardPlan, open_server_client

POLL_INTERVAL_SECONDS = 1.0
MAX_SILENT_CHECKS = 4  # After so many checks without a sign of life, a running shard counts as dead.
GATHER_SECONDS = 60.0  # A network file system may show the last lines of a completed shard so late.
MAX_IDLE_CHECKS = 2  # After so many checks in a row at which no shard was running, the job warns.
CANCEL_TIMEOUT_SECONDS = 20.0  # A worker kills a run that waits for cancelled shards for 30 s.
MAX_FRUITLESS_ATTEMPTS = 3  # After so many attempts in a row without any outcome, the job gives up the shard.
MAX_JOB_TASK_RUNS = 10_000  # task runs of all shards together, unless `executions_per_task` is set
LEDGER_PAGE_LINES = 5000
MAX_OUTAGE_SECONDS = 300.0  # If the server or the ledger does not answer for so long, the job fails.


@dataclass(slots=True)
class ShardingExecutor:
    """An executor that runs a job's executions in shards, and adds the shards' usage to the run's."""

    run: Run
    store: ShardStore
    plan: ShardPlan
    _offsets: dict[Path, int] = field(default_factory=dict[Path, int])  # bytes of each part that were read
    _idle_checks: int = 0  # checks for heartbeats in a row at which no shard was running
    _job_id: str = ""  # a part of the names of these shards' files
    _shards: list[Shard] = field(default_factory=list[Shard])
    _active: dict[int, Shard] = field(default_factory=dict[int, Shard])  # shards with an unfinished flow run, by number

    @property
    def is_over(self) -> bool:
        return self.run.stop.has_too_many_failures

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        async with open_server_client() as client:
            await self._cancel_earlier_runs(client)
            await self._add_executions(executions, find_result)
            deadline = asyncio.timeout_at(self.run.stop.ends_at)
            try:
                async with deadline:
                    await self._run_shards(client)
            except TimeoutError:
                await self._cancel_active(client)
                if not deadline.expired():
                    raise
                await self._fail_unfinished(self._shards, self.run.stop.build_error)
            except BaseException:
                # If the job ends, its shards end too. They continue only if the job's process is killed.
                await asyncio.shield(self._cancel_active(client))
                raise

    async def _cancel_earlier_runs(self, client: PrefectClient) -> None:
        """Cancel the shards of this flow run's earlier tries, and of earlier runs on this ledger."""
        ledger = self.run.ledger
        if ledger.has_other_writers:
            return  # Another run on this ledger is alive, and its shards too.
        jobs = {uuid.UUID(flow_run.id)}
        for record in await asyncio.to_thread(list_run_records, ledger.path):
            if record.flow_run_id:
                jobs.add(uuid.UUID(record.flow_run_id))
        await self._wait_for_ends(client, await cancel_runs(client, jobs))

    async def _add_executions(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        """Add all executions and their earlier results to the store, and cut those without a result into shards."""
        first = count = 0
        for count, execution in enumerate(executions, 1):
            if count == 1:
                first = execution.index
            self.store.add_execution(execution)
            if count % 500 == 0:
                await asyncio.sleep(0)  # A million executions take half a minute, and Ctrl-C must work meanwhile.
        end = first + count
        await self._record_earlier_results(first, end, find_result)
        bounds = [*self.store.find_starts(first, end, self.plan.shard_count), end]
        self._shards = [Shard(number, *bound) for number, bound in enumerate(itertools.pairwise(bounds))]
        self._active = {}
        self._job_id = uuid.uuid4().hex[:12]

    async def _record_earlier_results(self, start: int, stop: int, find_result: FindResult) -> None:
        """Record the results that the run's ledger has, and with `cache_results` those that `find_result` finds."""
        self._offsets = {}
        async for line in self._read_news():
            outcome = self.store.record_line(line) if line.is_success else None
            if outcome is not None:
                self._record_cached(outcome)
        if self.run.options.cache_results:
            for execution in self.store.iterate_unfinished(start, stop):
                result = find_result(execution)
                if result is not None:
                    self.store.record_adopted(execution)
                    self._record_cached(result)

    def _record_cached(self, outcome: Outcome) -> None:
        self.run.sink.record_cached(_make_placeholder(outcome), outcome, is_stored=True)
        self.run.sink.raise_error()

    async def _read_news(self) -> AsyncIterator[LedgerLine]:
        """Yield the lines that were added to the ledger since the last call."""
        new_lines = self.run.ledger.read_new_lines(self._offsets)
        while page := await asyncio.to_thread(lambda: list(itertools.islice(new_lines, LEDGER_PAGE_LINES))):
            for line in page:
                yield line
            await asyncio.sleep(0)  # There may be many lines, and others use this event loop.

    async def _gather_outcomes(self) -> None:
        """Record the outcomes that were added to the ledger, and their usage of sandboxes and models."""
        async for line in self._read_news():
            outcome = self.store.record_line(line)
            self._count_usage(line)
            if outcome is not None:
                self.run.sink.record_gathered(_make_placeholder(outcome), outcome)

    def _count_usage(self, line: LedgerLine) -> None:
        """Add the usage by an execution of this job's shards. Lines of other writers are ignored."""
        # The name of a shard's part is "part-JOB-SHARD-...".
        _, job, *numbers = PurePath(line.position.part).name.split("-")
        if job != self._job_id:
            return
        meta = line.to_outcome().meta
        is_new_sandbox = self.store.count_occurrence(hashlib.sha256(meta.sandbox_id.encode()).digest()) == 1
        if is_new_sandbox:
            self.run.usage.sandboxes += 1
        queries = meta.queries
        spent = Usage(queries.calls, queries.prompt_tokens, queries.completion_tokens, queries.cost)
        self.run.usage.model += spent
        shard_number = int(numbers[0])
        self._shards[shard_number].spent += spent

    async def _run_shards(self, client: PrefectClient) -> None:
        """Start the shards, and watch them until all executions have an outcome."""
        waiting = self._shards[::-1]
        read_clock = asyncio.get_running_loop().time
        checked_at = answered_at = read_clock()
        while True:
            if self.run.stop.has_too_many_failures:
                await self._cancel_active(client)
                break
            try:
                await poll_states(client, self._active.values())
                if read_clock() - checked_at >= HEARTBEAT_SECONDS:
                    checked_at = read_clock()
                    await self._check_for_heartbeats(client)
                await self._gather_outcomes()
                await self._take_ended(client, waiting)
                await self._start_waiting(client, waiting)
                answered_at = read_clock()
            except (httpx.HTTPError, OSError):  # The server or the ledger may answer again.
                if read_clock() - answered_at > MAX_OUTAGE_SECONDS:
                    raise
            self.run.sink.raise_error()
            if not self._active and not waiting:
                break
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        await asyncio.to_thread(self.run.ledger.close)  # This sends the results that came from other ledgers.
        await self._gather_outcomes()
        self.run.sink.raise_error()
        if self.run.stop.has_too_many_failures:
            await self._fail_unfinished(self._shards, self.run.stop.build_error)

    async def _check_for_heartbeats(self, client: PrefectClient) -> None:
        """Count the workers, look for heartbeats of the shards, and warn if no shard has run for some time."""
        await self.plan.count_workers(client)
        shards = list(self._active.values())
        await look_for_heartbeats(client, shards)
        is_idle = len(shards) > 0 and not any(shard.is_running for shard in shards)
        self._idle_checks = self._idle_checks + 1 if is_idle else 0
        if self._idle_checks == MAX_IDLE_CHECKS:
            self._idle_checks = 0
            self.run.sink.warn(
                f"no shard has run for {MAX_IDLE_CHECKS * HEARTBEAT_SECONDS} s, and the work pool {self.plan.pool} has "
                f"{self.plan.online_workers} workers: start one with a --limit of at least 2, and resume the pool, "
                "its queue and the deployment if they are paused"
            )

    async def _start_waiting(self, client: PrefectClient, waiting: list[Shard]) -> None:
        """Start waiting shards from the end of the list, while there is room for them."""
        while waiting and len(self._active) < self.plan.compute_max_active():
            shard = waiting.pop()
            if not self._count_unfinished(shard):
                continue
            try:
                # Without a shield, a cancelled job might not find a flow run that it has just created.
                await run_shielded(self._start_attempt(client, shard))
            except (httpx.HTTPError, OSError):
                waiting.append(shard)
                shard.attempt -= 1
                raise

    def _count_unfinished(self, shard: Shard) -> int:
        return self.store.count_unfinished(shard.start, shard.stop)

    async def _start_attempt(self, client: PrefectClient, shard: Shard) -> None:
        """Write the work of an attempt, and create its flow run.

        Raises OSError if the work cannot be written, and httpx.HTTPError if the server does not answer.
        """
        shard.attempt += 1
        shard.unfinished_at_start = self._count_unfinished(shard)
        provider, noun = self.run.provider, self.run.plan.report_spec.noun
        files = ShardFiles(self.run.ledger.path, self._job_id, shard.number, shard.attempt)
        header = ShardHeader(len(self._shards), shard.unfinished_at_start, noun, await provider.commit())
        executions = self.store.iterate_unfinished(shard.start, shard.stop)
        await asyncio.to_thread(files.write_work, header, executions)
        parameters = {
            "work": str(files.work_path),
            "options": asdict(self._build_options(shard)),
            "files_digest": await provider.compute_files_digest(),
        }
        name = f"{flow_run.name} {shard.number + 1} of {len(self._shards)}"
        if shard.attempt > 1:
            name += f", attempt {shard.attempt}"
        run = await arun_deployment(
            self.plan.deployment_id,
            client=client,
            parameters=parameters,
            flow_run_name=name,
            timeout=0,
            idempotency_key=parameters["work"],
        )
        shard.run_id, shard.state, shard.silent_checks = run.id, run.state, 0
        self._active[shard.number] = shard

    def _build_options(self, shard: Shard) -> Options:
        """Return the job's parameters for one shard."""
        options = self.run.options
        deadline = None
        if self.run.stop.ends_at is not None:
            deadline = max(1.0, self.run.stop.ends_at - asyncio.get_running_loop().time())
        per_task = math.ceil(max(self.run.plan.total / MAX_JOB_TASK_RUNS, shard.unfinished_at_start / MAX_TASK_RUNS))
        # Earlier rounds of this job, such as the chunks before their reduction, have used a part of the limits.
        before = self.run.usage.model - sum((other.spent for other in self._shards), Usage())
        spent = shard.spent
        calls = self._divide_limit(options.max_total_llm_calls, before.calls, spent.calls)
        tokens = self._divide_limit(options.max_total_llm_tokens, before.tokens, spent.tokens)
        return replace(
            options,
            prepare=None if options.preparation is None else options.preparation.code,
            check=options.check_code,
            on_failure="return",
            max_failures=self.run.stop.failure_limit,
            deadline=deadline,
            executions_per_task=options.executions_per_task or per_task,
            cache_results=False,
            results_path=str(self.run.ledger.path),
            shards=None,
            max_total_llm_calls=None if calls is None else int(calls),
            max_total_llm_tokens=None if tokens is None else int(tokens),
            max_cost=self._divide_limit(options.max_cost, before.cost or 0.0, spent.cost or 0.0),
        )

    def _divide_limit(self, limit: float | None, before: float, spent: float) -> float | None:
        """Return what a shard may still use: its part of a limit, of which the job has used `before` in earlier rounds.

        `spent` is the usage by the shard's earlier attempts.
        """
        return None if limit is None else max(0.0, (limit - before) / len(self._shards) - spent)

    async def _take_ended(self, client: PrefectClient, waiting: list[Shard]) -> None:
        """Remove the ended shards from the active ones, and add those without all outcomes to `waiting`."""
        for shard in list(self._active.values()):
            if await self._has_ended(client, shard):
                del self._active[shard.number]
                if self._count_unfinished(shard):
                    waiting.append(shard)

    async def _has_ended(self, client: PrefectClient, shard: Shard) -> bool:
        """Return whether an attempt has ended, or counts as dead. Raise an error of the shard that ends the job."""
        if shard.state is None:
            await self._settle_attempt(shard, "its flow run was deleted")
            return True
        if shard.has_ended:
            if shard.state.is_completed():
                await self._gather_last_outcomes(shard)
            else:
                await self._gather_outcomes()
            await self._settle_attempt(shard, f"{shard.state.name}: {shard.state.message}")
            return True
        if not shard.has_started or shard.run_id is None:
            return False
        max_checks = MAX_SILENT_CHECKS if shard.is_running else self.plan.start_timeout_seconds / HEARTBEAT_SECONDS
        if shard.silent_checks >= max_checks:
            with suppress(httpx.HTTPError, ObjectNotFound):
                # If the process still lives, it ends when it reads this state.
                crashed = Crashed(message="its process or worker ended: no sign of life")
                await client.set_flow_run_state(shard.run_id, crashed, force=True)
            await self._settle_attempt(shard, f"no sign of life for {shard.silent_checks * HEARTBEAT_SECONDS} s")
            return True
        return False

    async def _gather_last_outcomes(self, shard: Shard) -> None:
        """Record the outcomes of a completed attempt. Wait for those that a network file system shows late."""
        give_up_at = asyncio.get_running_loop().time() + GATHER_SECONDS
        while True:
            await self._gather_outcomes()
            is_over = not self._count_unfinished(shard) or self.run.stop.has_too_many_failures
            if is_over or asyncio.get_running_loop().time() >= give_up_at:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _settle_attempt(self, shard: Shard, reason: str) -> None:
        """Fail the unfinished executions of an ended attempt, unless another attempt may run them.

        Raises an error that ends the job, if the shard failed with one that every worker would raise.
        """
        unfinished_count, number = self._count_unfinished(shard), shard.number + 1
        has_outcomes = unfinished_count < shard.unfinished_at_start
        shard.fruitless_attempts = 0 if has_outcomes else shard.fruitless_attempts + 1
        if not unfinished_count or self.run.stop.has_too_many_failures:
            return
        state_name, message = "", ""
        if shard.state is not None:
            state_name, message = shard.state.name, shard.state.message
        for kind in (ConfigurationError, PrepareError):
            if state_name == kind.__name__:
                raise kind(f"shard {number}: {message}")
        if state_name == DeadlineExceeded.__name__:
            await self._fail_unfinished([shard], self.run.stop.build_error)
        elif state_name == "Cancelled" or shard.fruitless_attempts >= MAX_FRUITLESS_ATTEMPTS:
            text = f"not finished: its shard, number {number}, ended without a result: {reason}"
            await self._fail_unfinished([shard], lambda _: NotRun(text))
        else:
            text = "shard %d ended with %d executions left, and is started again: %s"
            self.run.log.warning(text, number, unfinished_count, reason)

    async def _fail_unfinished(self, shards: list[Shard], build_error: Callable[[Execution], RlmBatchError]) -> None:
        """Record a failure for each execution of these shards that has no outcome."""
        for shard in shards:
            for execution in self.store.iterate_unfinished(shard.start, shard.stop):
                self.run.sink.record_unrun(execution, build_error(execution))
                await asyncio.sleep(0)  # There may be many, and others use this event loop.

    async def _cancel_active(self, client: PrefectClient) -> None:
        """Cancel the job's shards, wait until they have ended, and record what they have written."""
        with suppress(httpx.HTTPError):
            await self._wait_for_ends(client, await cancel_runs(client, [uuid.UUID(flow_run.id)]))
        try:
            await asyncio.to_thread(self.run.ledger.close)
            await self._gather_outcomes()
        except OSError as error:  # The error that ends the job matters more.
            self.run.log.error("%s", error)

    async def _wait_for_ends(self, client: PrefectClient, cancelled: set[uuid.UUID]) -> None:
        """Wait until cancelled shards have ended. Raises httpx.HTTPError if the server does not answer."""
        give_up_at = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_SECONDS
        running = len(cancelled)
        while running and asyncio.get_running_loop().time() < give_up_at:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            runs = await read_flow_runs(client, cancelled)
            running = sum(run.state is None or not run.state.is_final() for run in runs.values())
        if running:
            text = "%d shards were cancelled, and have not ended within %.0f s"
            self.run.log.warning(text, running, CANCEL_TIMEOUT_SECONDS)


def _make_placeholder(outcome: Outcome) -> Execution:
    """Return an execution for the sink. It replaces the execution with this outcome, which ran in another process."""
    return Execution(outcome.meta.index or 0, "", outcome.meta.variables, "")
