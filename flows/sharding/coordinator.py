"""A job in shards: cut by number, each shard a run of the shard deployment, their outcomes gathered from the ledger.

Prefect schedules and runs the shards; here is what makes them one job. The loop looks every second at what the ledger
has gained, at the states of the shards' runs and at their signs of life. A shard that ends without all of its outcomes,
or falls silent, is begun again with the rest. Its runs have idempotency keys that the ledger and the inputs decide, so
that a job that is run again on its ledger finds the shards that its predecessor has left running.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling, Crashed

from ...sandbox.budget import Usage
from ...sandbox.errors import ConfigurationError, NotRun
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import LedgerLine
from ...tasks.ledger.shard_files import Heartbeat, ShardFiles, ShardHeader, find_last_attempts, load_or_create_cut
from ...tasks.ledger.shard_store import ShardStore
from ..parameters import TASK_RUNS
from .work_pool import Workers, server, workers

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

    from ...tasks.execution import Execution
    from ..engine.job import Run

LOOK = 1.0  # seconds between two looks at the shards
SILENT = 60.0  # seconds without a sign of life, which is given every 10, after which a running shard is taken for dead
UNSEEN = 60.0  # seconds without any shard running, after which that is said
AWAY = (
    300.0  # seconds without an answer of the server or the ledger, after which the job ends: shards have ended before
)
ELSEWHERE = 32  # shards at one time that no worker runs itself
FRUITLESS = 3  # attempts at a shard, one after the other, that bring no outcome at all, before it is given up
ENDING = 20.0  # seconds for shards to end that were cancelled: after 30 a worker kills the run that waits for them
BY_ITSELF = 10_000  # executions in a shard where nobody says how many: minutes of work, and its outcomes fit in a page
JOB_TASK_RUNS = 10_000  # of all shards together, where nobody says how many executions a task run has
UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED)
PAGE = 200  # flow runs that the server gives at one time
LINES = 5000  # of the ledger that are read at a time


@dataclass(slots=True)
class _Shard:
    """One shard, numbers from `start` up to `stop`, and the attempt at it that is under way or was the last."""

    number: int
    start: int
    stop: int
    attempt: int = 0
    portion: ShardFiles | None = None
    run_id: UUID | None = None
    state: Any = None
    beat: Heartbeat | None = None
    heard: float = 0.0  # when its sign of life changed last, or the state of its run, by the loop's clock
    left: int = 0  # executions without an outcome when the attempt began
    fruitless: int = 0
    adopted: bool = False
    deleted: bool = False  # the server has its run no longer
    spent: list[Heartbeat] = field(default_factory=list[Heartbeat])  # the last of each attempt's signs of life


class Sharding:
    """The shards of one flow run. `catalogue` has its executions, and their outcomes as they come."""

    catalogue: ShardStore

    def __init__(self, asked: int | Literal["auto"], total: int, where: Workers, online: int) -> None:
        self._workers = where
        self._online = online
        enough = max(math.ceil(total / BY_ITSELF), online)
        self._shards = min(total, enough if asked == "auto" else asked)
        self._follow: Callable[[], Iterator[LedgerLine]] | None = None
        self._looked = 0.0  # when the shards were looked at last, by the loop's clock
        self._troubles = dict[str, float]()  # since when the server or the ledger has not answered
        self._ledger_id = ""

    @classmethod
    async def checked(
        cls, asked: int | Literal["auto"], total: int, log: logging.Logger | logging.LoggerAdapter[Any]
    ) -> Sharding:
        """Shards that can run beside this flow run. Raises ConfigurationError where they cannot."""
        try:
            async with server() as client:
                where = await workers(client, log)
                online = await where.online(client) if where.waits_for_workers else 1
        except PrefectHTTPStatusError as error:
            raise ConfigurationError(f"the Prefect server does not say where shards can run: {error}") from error
        return cls(asked, total, where, online)

    def open_store(self, ledger: Ledger) -> ShardStore:
        """The store of this job's executions and outcomes, whose results are in that ledger."""
        self.catalogue = ShardStore(ledger=ledger)
        return self.catalogue

    @property
    def described(self) -> str:
        """What is said of it when the run begins."""
        return f"in {self._shards} shards on the work pool {self._workers.pool}"

    # ------------------------------------------------------------------------------------------------------- the job

    async def drive(self, run: Run, executions: Iterator[Execution]) -> None:
        """Runs what has no result yet in shards. Every one of these executions has an outcome when it returns."""
        shards, job = await self._cut(run, executions)
        async with server() as client:
            active: dict[int, _Shard] = {}
            limit = asyncio.timeout_at(run.until)
            try:
                async with limit:
                    await self._see_through(client, run, job, shards, active)
            except TimeoutError:
                await self._end(client, run, active)
                if not limit.expired():
                    raise
                for execution in self.catalogue.iterate_unfinished(shards[0].start, shards[-1].stop):
                    run.fail(execution, run.out_of_time(execution, "passed before this execution had ended"))
            except BaseException:
                # Whoever ends this job does not want its shards to go on. It is killed that leaves them.
                await asyncio.shield(self._end(client, run, active))
                raise
        for beat in (beat for shard in shards for beat in shard.spent):
            run.opened += beat.sandboxes
            run.open_seconds += beat.sandbox_seconds
            run.used_elsewhere += Usage(beat.calls, beat.prompt_tokens, beat.completion_tokens, beat.cost)

    async def _cut(self, run: Run, executions: Iterator[Execution]) -> tuple[list[_Shard], str]:
        """Takes all executions into the catalogue, settles those that have a result, and shares out the rest."""
        if self._follow is None:
            self._follow = run.ledger.follow_lines()
            async for line in self._news():
                self.catalogue.add_previous_line(line)
        keys = hashlib.sha256()
        first, count = 0, 0
        for execution in executions:
            first = execution.index if not count else first
            count += 1
            keys.update(execution.key.encode())
            result = run.recall(execution)
            self.catalogue.add_execution(execution)
            if result is not None:
                self.catalogue.record_previous_result(execution)
                run.tell(execution, result, cached=True)
            if count % 500 == 0:
                await asyncio.sleep(0)  # a million take half a minute, in which Ctrl-C is heard
        job = hashlib.sha256(f"{keys.hexdigest()} {first}".encode()).hexdigest()[:12]
        size = math.ceil(count / min(self._shards, count))
        cut = await asyncio.to_thread(load_or_create_cut, run.ledger.path, job, size)
        self._ledger_id, size = cut.ledger_id, cut.shard_size
        starts = range(first, first + count, size)
        if len(starts) != min(self._shards, count):
            run.log.info("the job goes on in the %d shards that it was cut into before", len(starts))
        shards = [_Shard(number, start, min(start + size, first + count)) for number, start in enumerate(starts)]
        return shards, job

    async def _news(self) -> AsyncIterator[LedgerLine]:
        """What the ledger has gained since the last time."""
        assert self._follow is not None
        new = self._follow()
        while lines := await asyncio.to_thread(lambda: list(itertools.islice(new, LINES))):
            for line in lines:
                yield line
            await asyncio.sleep(0)

    async def _gather(self, run: Run) -> None:
        """Takes in what the ledger has gained."""
        async for line in self._news():
            outcome = self.catalogue.record_line(line)
            if outcome is not None:
                run.gathered(outcome)

    async def _see_through(
        self, client: PrefectClient, run: Run, job: str, shards: list[_Shard], active: dict[int, _Shard]
    ) -> None:
        made = await asyncio.to_thread(find_last_attempts, run.ledger.path, job)
        for shard in shards:
            shard.attempt = made.get(shard.number, 0)
            if shard.attempt and self.catalogue.count_unfinished(shard.start, shard.stop):
                await self._adopt(client, run, job, shard, active)
        waiting = [shard for shard in shards if shard.number not in active]
        waiting.reverse()
        clock = asyncio.get_running_loop().time
        looked = running = self._looked = clock()
        while True:
            while waiting and len(active) < self._at_once():
                shard = waiting.pop()
                if self.catalogue.count_unfinished(shard.start, shard.stop):
                    active[shard.number] = shard  # before its run is made: whoever ends the job has to find it
                    try:
                        await self._begin(client, run, job, shard, len(shards))
                    except (httpx.HTTPError, OSError) as error:  # for the moment, perhaps
                        del active[shard.number]
                        waiting.append(shard)
                        shard.attempt -= 1
                        self._trouble("beginning", error)
                        break
                    self._fine("beginning")
            if not active and not waiting:
                break
            await asyncio.sleep(LOOK)
            await self._look(client, active)
            try:
                await self._gather(run)
                for shard in list(active.values()):
                    if await self._over(client, run, shard):
                        del active[shard.number]
                        if self.catalogue.count_unfinished(shard.start, shard.stop):
                            waiting.append(shard)
                self._fine("ledger")
            except OSError as error:  # of a location that does not answer for the moment
                self._trouble("ledger", error)
            now = clock()
            if any(shard.beat is not None for shard in active.values()) or not active:
                running = now
            if now - looked >= SILENT / 2 and self._workers.waits_for_workers:
                with suppress(httpx.HTTPError):
                    looked, self._online = now, await self._workers.online(client)
            if now - running >= UNSEEN:
                running = now
                run.warn(self._nobody())
        await run.shut()  # the results that were taken from elsewhere
        await self._gather(run)

    def _trouble(self, what: str, error: Exception) -> None:
        """That did not answer. Raises the error once it has been so for too long."""
        now = asyncio.get_running_loop().time()
        if now - self._troubles.setdefault(what, now) > AWAY:
            raise error

    def _fine(self, what: str) -> None:
        self._troubles.pop(what, None)

    def _at_once(self) -> int:
        """Shards at one time, and no more than the pool takes.

        For each worker that runs them itself one that runs and one that is ready. Where others run them, in containers
        for example, workers say nothing of how many there may be.
        """
        most = max(2, 2 * self._online) if self._workers.runs_itself else ELSEWHERE
        return min(most, self._workers.places or most)

    def _nobody(self) -> str:
        pool = self._workers.pool
        if not self._online and self._workers.waits_for_workers:
            return f"no shard is running: the work pool {pool} has no worker any more; start one, and the job goes on"
        return (
            f"no shard has run for {UNSEEN:.0f} s, although the work pool {pool} has a worker: the workers are busy, "
            "or have no place beside this flow run (their --limit has to be 2 at least where one of them runs it)"
        )

    # ------------------------------------------------------------------------------------------------------ one shard

    def _portion(self, run: Run, job: str, shard: _Shard) -> ShardFiles:
        return ShardFiles(run.ledger.path, job, shard.number, shard.attempt)

    def _idempotency_key(self, portion: ShardFiles) -> str:
        # Two ledgers may have the same job, each its own shards; and one may be removed and be made anew.
        return f"rlm-batch {self._ledger_id} {portion.job} {portion.shard} {portion.attempt}"

    async def _adopt(self, client: PrefectClient, run: Run, job: str, shard: _Shard, active: dict[int, _Shard]) -> None:
        """Takes over the run of the last attempt at a shard, if there is one that is not over."""
        portion = self._portion(run, job, shard)
        only = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[self._idempotency_key(portion)]))
        found = await client.read_flow_runs(flow_run_filter=only, limit=1)
        if not found:
            if await asyncio.to_thread(portion.read_heartbeat) is None:
                shard.attempt -= 1  # its work was written, and no run was made of it
        elif found[0].state is None or not (found[0].state.is_final() or found[0].state.is_cancelling()):
            run.log.info("shard %d is under way: its run %s is taken over", shard.number + 1, found[0].name)
            self._under_way(shard, portion, found[0])
            shard.adopted = True
            active[shard.number] = shard

    async def _begin(self, client: PrefectClient, run: Run, job: str, shard: _Shard, shards: int) -> None:
        shard.attempt += 1
        shard.portion, shard.run_id = self._portion(run, job, shard), None
        shard.state = shard.beat = None
        shard.adopted = shard.deleted = False
        portion = shard.portion
        shard.left = self.catalogue.count_unfinished(shard.start, shard.stop)
        head = ShardHeader(
            job=job,
            shard=shard.number,
            shards=shards,
            attempt=shard.attempt,
            total=shard.left,
            what=run.record.what,
            commit=await run.provider.commit(),
        )
        try:
            await asyncio.to_thread(
                portion.write_work, head, self.catalogue.iterate_unfinished(shard.start, shard.stop)
            )
        except OSError as error:
            # With one argument, or its text would begin with a number in brackets.
            raise OSError(
                f"the work of a shard could not be written to {portion.work_path}: {error.strerror or error}. What has "
                "a result stays: see to that place, and run again with the same results_path"
            ) from error
        again = f", attempt {shard.attempt}" if shard.attempt > 1 else ""
        found = await arun_deployment(
            self._workers.deployment_id,
            client=client,
            parameters={
                "work": str(portion.work_path),
                "options": self._options(run, shard, shards),
                "volume_name": run.provider.volume_name,
            },
            flow_run_name=f"{run.record.name} {shard.number + 1} of {shards}{again}",
            timeout=0,
            idempotency_key=self._idempotency_key(portion),
        )
        self._under_way(shard, portion, found)

    def _options(self, run: Run, shard: _Shard, shards: int) -> dict[str, Any]:
        """The job's parameters, as they are for one shard."""
        given = run.options
        now = asyncio.get_running_loop().time()
        cost = None
        if given.max_cost is not None:
            left = given.max_cost - (run.used_elsewhere.cost or 0.0)  # by the shards of what came before, if anything
            cost = max(0.0, left / shards - sum(beat.cost or 0.0 for beat in shard.spent))
        per_task = max(math.ceil(run.total / JOB_TASK_RUNS), math.ceil(shard.left / TASK_RUNS))
        options = replace(
            given,
            on_failure="return",
            deadline=None if run.until is None else max(1.0, run.until - now),
            executions_per_task=given.executions_per_task or per_task,
            cache_results=False,
            results_path=str(run.ledger.path),
            shards=None,
            max_cost=cost,
        )
        return {item.name: getattr(options, item.name) for item in fields(options)}

    def _under_way(self, shard: _Shard, portion: ShardFiles, found: FlowRun) -> None:
        shard.portion, shard.run_id, shard.state = portion, found.id, found.state
        shard.beat = None
        shard.left = self.catalogue.count_unfinished(shard.start, shard.stop)
        shard.heard = asyncio.get_running_loop().time()

    async def _look(self, client: PrefectClient, active: dict[int, _Shard]) -> None:
        """Looks at the states and the signs of life of the shards that are under way."""
        clock = asyncio.get_running_loop().time
        by_id = {shard.run_id: shard for shard in active.values() if shard.run_id is not None}
        ids, seen = list(by_id), set[UUID]()
        try:
            for start in range(0, len(ids), PAGE):
                only = FlowRunFilter(id=FlowRunFilterId(any_=ids[start : start + PAGE]))
                for found in await client.read_flow_runs(flow_run_filter=only, limit=PAGE):
                    shard = by_id[found.id]
                    seen.add(found.id)
                    if found.state is not None and (shard.state is None or found.state.id != shard.state.id):
                        shard.state, shard.heard = found.state, clock()
        except httpx.HTTPError as error:  # a server that is away comes back
            self._trouble("server", error)
        else:
            self._fine("server")
            for run_id, shard in by_id.items():
                shard.deleted = run_id not in seen
        # Time in which nobody looked, because the server or the ledger did not answer, is no silence of a shard's.
        now, looked, self._looked = clock(), self._looked, clock()
        if now - looked > SILENT / 6:
            for shard in active.values():
                shard.heard += now - looked
        for shard in active.values():
            assert shard.portion is not None
            beat = await asyncio.to_thread(shard.portion.read_heartbeat)
            if beat is not None and (shard.beat is None or beat.count != shard.beat.count):
                shard.beat, shard.heard = beat, now

    async def _over(self, client: PrefectClient, run: Run, shard: _Shard) -> bool:
        """Whether an attempt has ended, by itself or because it is taken for dead. Raises what ends the whole job."""
        state = shard.state
        if shard.deleted:
            self._ended(run, shard, "its flow run was deleted")
            return True
        if state is not None and state.is_final():
            assert shard.portion is not None
            shard.beat = await asyncio.to_thread(shard.portion.read_heartbeat) or shard.beat
            await self._gather_last(run, shard)
            error = shard.beat.error if shard.beat is not None else None
            said = f"{error[0]}: {error[1]}" if error is not None else state.message or state.name
            self._ended(run, shard, f"{state.name}: {said}" if said != state.name else said)
            return True
        silent = asyncio.get_running_loop().time() - shard.heard
        begun = state is not None and state.type in (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
        if (
            "server" not in self._troubles
            and begun
            and silent > (SILENT if shard.beat is not None else self._workers.starting)
        ):
            assert shard.run_id is not None
            text = "its worker or its process has gone: it gave no sign of life"
            with suppress(httpx.HTTPError, ObjectNotFound):
                await client.set_flow_run_state(shard.run_id, Crashed(message=text), force=True)
            self._ended(run, shard, f"no sign of life for {silent:.0f} s")
            return True
        return False

    async def _gather_last(self, run: Run, shard: _Shard) -> None:
        """Takes in all that an attempt has written which is over: a file system of a network may show it later."""
        until = asyncio.get_running_loop().time() + SILENT
        while True:
            await self._gather(run)
            taken = shard.left - self.catalogue.count_unfinished(shard.start, shard.stop)
            told = shard.beat.done if shard.beat is not None else 0
            if shard.adopted or taken >= told or asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(LOOK)

    def _ended(self, run: Run, shard: _Shard, how: str) -> None:
        """What follows from an attempt's end: nothing more, another attempt, or that its executions are given up."""
        self._count(shard)
        left = self.catalogue.count_unfinished(shard.start, shard.stop)
        if not left:
            return
        beat, number = shard.beat, shard.number + 1
        if beat is not None and beat.error is not None and beat.error[0] == "ConfigurationError":
            raise ConfigurationError(f"shard {number}: {beat.error[1]}")
        if beat is not None and beat.late:
            for execution in self.catalogue.iterate_unfinished(shard.start, shard.stop):
                run.fail(execution, run.out_of_time(execution, "is over before the provider opens more sandboxes"))
        elif shard.state is not None and shard.state.type == StateType.CANCELLED:
            self._give_up(run, shard, f"its shard, number {number}, was cancelled")
        elif shard.fruitless >= FRUITLESS:
            self._give_up(run, shard, f"its shard, number {number}, ended {FRUITLESS} times without a result: {how}")
        else:
            text = "shard %d ended with %d executions undone, and is begun again: %s"
            run.log.warning(text, number, left, how)

    def _count(self, shard: _Shard) -> None:
        """Keeps what an attempt that is over has used, and whether it was of use."""
        if shard.beat is not None:
            shard.spent.append(shard.beat)
        done = self.catalogue.count_unfinished(shard.start, shard.stop) < shard.left
        shard.fruitless = 0 if done else shard.fruitless + 1

    def _give_up(self, run: Run, shard: _Shard, why: str) -> None:
        for execution in self.catalogue.iterate_unfinished(shard.start, shard.stop):
            run.fail(execution, NotRun(f"not run to its end: {why}"))

    async def _end(self, client: PrefectClient, run: Run, active: dict[int, _Shard]) -> None:
        """Cancels the shards that are under way, waits until they are over, and takes in what they have written."""
        for shard in active.values():
            with suppress(httpx.HTTPError, ObjectNotFound):
                if shard.run_id is None and shard.portion is not None:  # it was being made
                    key = FlowRunFilterIdempotencyKey(any_=[self._idempotency_key(shard.portion)])
                    found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key), limit=1)
                    shard.run_id = found[0].id if found else None
                if shard.run_id is not None:
                    await client.set_flow_run_state(shard.run_id, Cancelling())
        until = asyncio.get_running_loop().time() + ENDING
        left = {number: shard for number, shard in active.items() if shard.run_id is not None}
        while left and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK)
            with suppress(httpx.HTTPError):
                await self._look(client, left)
            left = {
                number: shard
                for number, shard in left.items()
                if not shard.deleted and (shard.state is None or not shard.state.is_final())
            }
        for shard in left.values():
            run.log.warning("shard %d was cancelled, and has not ended within %.0f s", shard.number + 1, ENDING)
        for shard in active.values():
            if shard.beat is not None:
                shard.spent.append(shard.beat)
        with run.said():
            await run.shut()
            await self._gather(run)


async def cancel_shards(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancels what is left of a cancelled flow run's shards: a hook, for when its process could not do that itself.

    Prefect hands over its arguments by these names.
    """
    if (flow_run.parameters or {}).get("shards") is None:
        return
    only = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED))),
    )
    asked = set[UUID]()
    async with get_client() as client:
        while found := await client.read_flow_runs(flow_run_filter=only, limit=PAGE):
            if not (new := [run.id for run in found if run.id not in asked]):
                break
            for run_id in new:
                asked.add(run_id)
                with suppress(ObjectNotFound):
                    await client.set_flow_run_state(run_id, Cancelling())
