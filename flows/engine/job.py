"""What the flows share: running many executions in lanes, with a ledger, and saying how they went."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefect import get_run_logger
from prefect.context import FlowRunContext

from ...blocks.language_model.model_access import Asking
from ...blocks.provider import SandboxProvider
from ...blocks.registry import resolve_provider
from ...blocks.volume import check_name
from ...sandbox.budget import Usage
from ...sandbox.errors import ConfigurationError, DeadlineExceeded, ExecutionsFailed, NotRun, RlmBatchError
from ...sandbox.meta import Meta
from ...sandbox.result import Failure, Outcome, Result
from ...tasks.capacity.slots import Slots, open_slots
from ...tasks.execute import TaskBatch, build_execute_task
from ...tasks.execution import Execution, assign_keys, with_index
from ...tasks.lane import Lane, ProviderUnusable
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import LedgerLine
from ...tasks.ledger.result_index import ResultIndex
from ...tasks.ledger.results_root import get_results_root
from ...tasks.ledger.run_record import ReportSpec, RunRecord
from ...tasks.query_task import QueryTracker
from ...tasks.retry import RetryPolicy
from ...tasks.task_log import LineBudget
from ..cleanup.orphans import register_own_run
from ..cleanup.server_identity import get_server_id
from ..parameters import TASK_RUNS, Options
from ..reporting.report import describe_usage
from ..sharding.coordinator import Sharding
from .artifacts import Told
from .gc_freeze import set_aside
from .outcome_store import InMemory, Kept


class Observer:
    """What a flow run tells whoever called it in this process, as it goes; the methods do nothing unless overridden."""

    def begun(self, total: int, how: str, results_path: str) -> None:
        """The run is about to start; `how` is the isolation that is in force, or where it is shared out to."""

    def warned(self, text: str) -> None:
        """There is something that a person should know, in a sentence."""

    def started(self, index: int) -> None:
        """An execution's task run has begun."""

    def ended(self, outcome: Outcome, *, cached: bool) -> None:
        """An execution has its outcome; `cached` where it was read from a ledger and not run."""


observer: ContextVar[Observer] = ContextVar("rlm_batch_observer", default=Observer())  # noqa: B039 - it has no state


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Every execution's outcome, in order, and where they are written."""

    results: Sequence[Outcome]
    failures: Sequence[Failure]  # those of them that failed for good
    results_path: str


async def run_all(
    items: Iterable[tuple[str, dict[str, Any]]],
    total: int,
    options: Options,
    label: Callable[[Execution], str],
    uploads: dict[str, Path] | None = None,
    about: ReportSpec | None = None,
) -> Outcomes:
    """Runs every pair of code and variables, `max_workers` at a time, and returns when all have an outcome.

    `label` names an execution's task run; `uploads` are files that each execution finds, by their paths there; `about`
    says what the report calls them. Raises ConfigurationError before anything runs, and OSError where the ledger cannot
    be written.
    """
    async with Run.begun(await resolve_provider(options.provider), total, options, label, about) as run:
        run.uploads = uploads or {}
        await run.drive(assign_keys(items, await run.fingerprint(), run.occurrence))
        return run.outcomes()


def with_volume(block: SandboxProvider, name: str) -> SandboxProvider:
    """The block with that volume. Raises ConfigurationError."""
    return block.model_copy(update={"volume_name": check_name(name)})


def raise_failures(outcomes: Outcomes, what: str, retrying: str = "run only those that failed") -> None:
    """Raises ExecutionsFailed if there are failures: how many, the first of them, and where the results are.

    `retrying` is what retrying the flow run does. Prefect retries runs of deployments alone.
    """
    failures = outcomes.failures
    if failures:
        first = failures[0]
        idle = sum(isinstance(failure.error, NotRun) for failure in failures)
        rest = f" and {idle} not run" if idle else ""
        raise ExecutionsFailed(
            f"{len(failures) - idle} of {len(outcomes.results)} {what} failed{rest}, first number {first.meta.index} "
            f"with {type(first.error).__name__}: {first.error.summary} -- the results are in {outcomes.results_path}; "
            f"{_again()} to {retrying}, or pass on_failure='return' to get them beside the results",
            results=outcomes.results,
            failures=failures,
            results_path=outcomes.results_path,
        )


def _again() -> str:
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    return "retry the flow run" if deployed else "run it again with the same results_path"


def _flow_run_id() -> str:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("this must be called in a flow run")
    return str(context.flow_run.id)


def _record(about: ReportSpec, results_path: str, provider: str, total: int) -> RunRecord:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return RunRecord(
        flow=context.flow_run.name if context.flow is None else context.flow.name,
        results_path=results_path,
        flow_run_id=str(context.flow_run.id),
        name=context.flow_run.name,
        what=about.noun,
        objective=about.objective,
        direction=about.direction,
        provider=provider,
        total=total,
        began=time.time(),
    )


class Run:
    """One flow run's lanes, and the outcomes as they come. A flow with a way of its own overrides what differs."""

    record: RunRecord  # of this run, in the ledger
    told: Told  # what of it is in the UI

    def __init__(
        self,
        provider: SandboxProvider,
        run_id: str,
        ledger: Ledger,
        options: Options,
        total: int,
        label: Callable[[Execution], str],
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self.provider = provider
        self.run_id = run_id
        self.options = options
        self.log = log
        self.asking: Asking | None = None
        self.uploads: dict[str, Path] = {}
        self.slots = Slots()
        self.ledger = ledger
        self._label = label
        self._observer = observer.get()
        self.kept: Kept = InMemory(total)
        self._under_way: dict[int, Execution] = {}
        self._per_task = options.executions_per_task or max(1, math.ceil(total / TASK_RUNS))
        self._lines = LineBudget() if options.log_output else None
        self.total = total
        self._known: dict[str, LedgerLine] = {}
        self.occurrence: Callable[[bytes], int] | None = None  # what counts identical executions, if not a dict
        self._sharding: Sharding | None = None
        self._tracker = QueryTracker()
        self.used_elsewhere = Usage()  # of the model, by shards
        self.opened = 0  # sandboxes, and
        self.open_seconds = 0.0  # how long those that are closed were open, together
        self._index: ResultIndex | None = None
        self.until: float | None = None  # the deadline, by the event loop's clock
        if options.deadline is not None:
            self.until = asyncio.get_running_loop().time() + options.deadline
        self.policy = RetryPolicy(options.retries, options.retry_code_errors, options.idempotent, self.until)
        self._too_late = False  # a lane has ended, because the provider asked to wait for longer than there is time
        self._making = asyncio.Lock()  # held while a task run is being made
        self.server = ""  # the Prefect server's id, for the sandboxes' labels

    @classmethod
    @asynccontextmanager
    async def begun(
        cls,
        provider: SandboxProvider,
        total: int,
        options: Options,
        label: Callable[[Execution], str],
        about: ReportSpec | None = None,
    ) -> AsyncIterator[Self]:
        """A run with its ledger open, which is told to whoever watches. Raises ConfigurationError."""
        sharding = None if options.shards is None else await Sharding.checked(options.shards, total, get_run_logger())
        how = f"isolation: {await provider.check()}" if sharding is None else sharding.described
        ledger = Ledger(options.results_path or get_results_root() / _flow_run_id())
        run = await cls.made(provider, ledger, options, total, label)
        await asyncio.to_thread(ledger.create)
        run.log.info("%d executions on %s; %s; results in %s", total, provider.provider_name, how, ledger.path)
        observer.get().begun(total, how, str(ledger.path))
        record = run.record = _record(about or ReportSpec(), str(ledger.path), provider.provider_name, total)
        await asyncio.to_thread(record.write)
        try:
            if not ledger.register_writer():
                run.warn(f"another run is writing to {ledger.path} at this moment: what both have to do is done twice")
            if sharding is None:
                run.knows(await asyncio.to_thread(ledger.load_latest_lines))
            else:
                run._shared_out(sharding)
            if options.cache_results:
                run._index = ResultIndex(get_results_root())
                run._index.refresh()
            telling = Told(record, run.log)
            async with telling as run.told, run.ready():
                yield run
                run._count()
                record.ended = time.time()
                await run.shut()  # before it is reported
        except BaseException:
            with run.said():
                await asyncio.shield(run.shut())
            raise
        finally:
            ledger.unregister_writer()
            run._count()
            await asyncio.shield(asyncio.to_thread(record.finish))
        run.log.info("%d of %d executions succeeded; results in %s", total - len(run.failed), total, ledger.path)

    async def shut(self) -> None:
        """Sees that all that was written is in the ledger. Raises OSError where a location does not take it."""
        await asyncio.to_thread(self.ledger.close)

    @contextmanager
    def said(self) -> Iterator[None]:
        """An OSError in it is for the log: there is another error, which is more than that."""
        try:
            yield
        except OSError as error:
            self.log.error("%s", error)

    def _count(self) -> None:
        self.record.sandboxes, self.record.sandbox_seconds = self.opened, self.open_seconds

    @classmethod
    async def made(
        cls,
        provider: SandboxProvider,
        ledger: Ledger,
        options: Options,
        total: int,
        label: Callable[[Execution], str],
    ) -> Self:
        """A run of the flow run that this is called in, with what its executions may ask. Raises ConfigurationError."""
        tracker = QueryTracker()
        asking = await options.asking(tracker.track_query)
        run = cls(provider, _flow_run_id(), ledger, options, total, label, get_run_logger())
        run._tracker = tracker
        run.asking = asking
        run.server = await get_server_id()
        register_own_run(run.run_id)
        return run

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[None]:
        """In it there are slots to be had, and queries are tracked."""
        try:
            async with self._tracker, open_slots(self.provider, self.run_id, self.log) as self.slots:
                yield
        finally:
            if self.asking is not None:
                self.log.info("the model was called %s", describe_usage(self.asking.spent.usage + self.used_elsewhere))

    def knows(self, known: dict[str, LedgerLine]) -> None:
        """These are the lines that the ledger had at the start, by their keys."""
        self._known = known

    def _shared_out(self, sharding: Sharding) -> None:
        """The executions run in shards, and what is known of them is in their catalogue."""
        self._sharding = sharding
        self.kept = sharding.open_store(self.ledger)
        self.occurrence = sharding.catalogue.count_occurrence

    async def drive(self, executions: Iterator[Execution]) -> None:
        """Runs what has no result yet. Every one of these executions has an outcome when it returns."""
        if self._sharding is not None:
            await self._sharding.drive(self, executions)
            return
        self._making = asyncio.Lock()
        works = _Ahead(self._works(self._to_do(executions)))
        task = await build_execute_task(self.policy, self.provider.provider_name, self._per_task)
        lanes = min(self.options.max_workers, math.ceil(self.total / self._per_task))
        try:
            with set_aside():
                async with asyncio.timeout_at(self.until), asyncio.TaskGroup() as group:
                    for _ in range(lanes):
                        group.create_task(self._lane(task, works))
        except TimeoutError:
            self._out_of_time(works, "passed before this execution had ended")
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        if self._too_late:
            self._out_of_time(works, "is over before the provider opens more sandboxes")

    def lane(self) -> Lane:
        """What runs executions one after the other."""
        return Lane(
            self.provider,
            self.run_id,
            server=self.server,
            reuse=self.options.reuse_sandboxes,
            timeout=self.options.timeout,
            slots=self.slots,
            asking=self.asking,
            uploads=self.uploads,
        )

    async def fingerprint(self) -> dict[str, Any]:
        """What every result of this run depends on: the provider's fingerprint, and the model's where there is one."""
        found = await self.provider.fingerprint()
        return found if self.asking is None else {**found, "language_model": self.asking.model.fingerprint()}

    def recall(self, execution: Execution) -> Result | None:
        """The result that this execution has from before, if there is one that counts."""
        line = self.before(execution.key)
        cached = line.to_outcome() if line is not None and line.is_success else None
        if cached is None and self._index is not None:
            line = self._index.find_result(execution.key)
            cached = line.to_outcome() if line is not None else None
            if isinstance(cached, Result):
                self.keep(execution, cached)
        return cached if isinstance(cached, Result) else None

    def before(self, key: str) -> LedgerLine | None:
        """The line that this ledger had of that key at the start. It is asked for once."""
        return (
            self._known.pop(key, None) if self._sharding is None else self._sharding.catalogue.find_previous_line(key)
        )

    def succeeded_before(self, key: str) -> bool:
        """Whether this ledger has a result of that key."""
        line = self._known.get(key)
        return line is not None and line.is_success

    def keep(self, execution: Execution, result: Result) -> None:
        """Writes a result from elsewhere to this run's own ledger."""
        self.ledger.write_outcome(execution.key, with_index(result, execution.index))

    def goes_on(self) -> bool:
        """Whether the next execution is to be begun, after what has become of those before."""
        return True

    async def _lane(self, task: Any, works: _Ahead) -> None:
        lane = self.lane()
        try:
            # A slot first: what is taken before there is one would wait for it while other lanes have nothing to do.
            while self.goes_on() and works.more() and await lane.acquire() and (work := works.next()) is not None:
                for execution in work.remaining_executions:
                    self._observer.started(execution.index)
                state = await self._task_run(task, lane, work)
                if state.is_cancelled():
                    raise asyncio.CancelledError
                if work.remaining_executions:
                    error = await state.result(raise_on_failure=False)
                    if isinstance(error, RlmBatchError) and self.policy.is_too_late(error):
                        self._too_late = True
                        self.slots.dismiss_waiters()  # nor do those that wait for a sandbox get one in time
                        return
                    self._unsettled(error, state)
                await lane.release_if_wanted()
            self.slots.dismiss_waiters()
        finally:
            await self.close(lane)

    async def close(self, lane: Lane) -> None:
        """Removes the lane's sandbox, gives its slot back, and counts what it had open."""
        await lane.release()
        self.opened += lane.opened_count
        self.open_seconds += lane.open_seconds

    async def _task_run(self, task: Any, lane: Lane, work: TaskBatch) -> Any:
        """The final state of a task run. Until it has begun its work, no other of this run's is made.

        Before that, Prefect asks the server for the limits of the task's tags. Where the server is away it does so for
        a minute for each task run that waits, one after the other, and also for those that nobody wants any more: the
        process would not end before. One that does not begin is the end of the flow run, and no other is made after it.
        """
        await self._making.acquire()
        return await task(lane, work, return_state=True)

    def _unsettled(self, error: Any, state: Any) -> None:
        if isinstance(error, ProviderUnusable) and error.__cause__ is not None:
            raise error.__cause__
        if isinstance(error, BaseException):
            raise error
        raise RuntimeError(f"a task run ended as {state.name} with executions undone: {state.message}")

    def _to_do(self, executions: Iterator[Execution]) -> Iterator[Execution]:
        """The executions without a result; the others are settled as they come by."""
        for execution in executions:
            cached = self.recall(execution)
            if cached is None:
                self._under_way[execution.index] = execution
                yield execution
            else:
                self.kept.add_outcome(execution, with_index(cached, execution.index))
                self.tell(execution, cached, cached=True)

    def _works(self, executions: Iterator[Execution]) -> Iterator[TaskBatch]:
        while group := list(itertools.islice(executions, self._per_task)):
            label = self._label(group[0])
            if len(group) > 1:
                label = f"{label} and {len(group) - 1} more"
            yield TaskBatch(
                label,
                group,
                self.policy,
                ledger=self.ledger,
                on_start=self._making.release,
                on_outcome=self._settled,
                line_budget=self._lines,
            )

    def _settled(self, execution: Execution, outcome: Outcome) -> None:
        self.kept.add_outcome(execution, outcome)
        del self._under_way[execution.index]
        self.tell(execution, outcome)

    def gathered(self, outcome: Outcome) -> None:
        """Tells an outcome that a shard has written."""
        self._observer.started(outcome.meta.index or 0)
        self.tell(Execution(outcome.meta.index or 0, "", outcome.meta.variables, ""), outcome)

    def warn(self, text: str) -> None:
        """Says in the log, and to whoever watches, what a person should know."""
        self.log.warning("%s", text)
        self._observer.warned(text)

    def tell(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        """Says that an execution has its outcome: in the log, in the UI, and to whoever watches."""
        if isinstance(outcome, Failure):
            self.say_failed(execution, outcome)
        self.told.ended(outcome)
        self._observer.ended(outcome, cached=cached)

    def say_failed(self, execution: Execution, failure: Failure) -> None:
        """Says in the log that an execution has failed, and how."""
        self.log.warning(
            "%s failed: %s: %s", self._label(execution), type(failure.error).__name__, failure.error.summary
        )

    def _out_of_time(self, works: _Ahead, how: str) -> None:
        """What was not done by the deadline fails with that. It is not written to the ledger: it may be run yet."""
        while (work := works.next()) is not None:
            for execution in work.remaining_executions:
                self._observer.started(execution.index)
        for execution in list(self._under_way.values()):
            self._give_up(execution, self.out_of_time(execution, how))

    def out_of_time(self, execution: Execution, how: str) -> DeadlineExceeded:
        """The error of an execution that was not done by the deadline."""
        return DeadlineExceeded(
            f"the flow run's deadline of {self.options.deadline:g} s {how}"
            + (f" ({execution.earlier_errors[-1]})" if execution.errors else "")
            + f"; {_again()}, or give it more with deadline="
        )

    def not_run(self, executions: Iterable[Execution], reason: str) -> None:
        """Settles those without an outcome, which are not begun because of others. No ledger has them either."""
        for execution in executions:
            if execution.index not in self.kept:
                self.fail(execution, NotRun(f"not run: {reason}"))

    def fail(self, execution: Execution, error: RlmBatchError) -> None:
        """Settles one that was never begun here."""
        self._under_way[execution.index] = execution
        self._observer.started(execution.index)
        self._give_up(execution, error)

    def _give_up(self, execution: Execution, error: RlmBatchError) -> None:
        meta = Meta(
            index=execution.index,
            variables=execution.variables,
            provider=self.provider.provider_name,
            attempt=execution.attempt,
            earlier_errors=execution.earlier_errors,
        )
        self._settled(execution, Failure(error, meta))

    @property
    def done(self) -> Sequence[Outcome]:
        """The outcomes so far, in order."""
        return self.kept.outcomes

    @property
    def failed(self) -> Sequence[Failure]:
        """The failures so far, in order."""
        return self.kept.failures

    def outcomes(self) -> Outcomes:
        """Every outcome, in order."""
        found = self.done
        if len(found) != self.total:
            raise ConfigurationError(
                f"the inputs changed while they were read: {self.total} at first, {len(found)} at the end"
            )
        return Outcomes(found, self.failed, str(self.ledger.path))


class _Ahead:
    """What is still to be done, and whether there is more of it."""

    def __init__(self, works: Iterator[TaskBatch]) -> None:
        self._works = works
        self._next: TaskBatch | None = None

    def more(self) -> bool:
        """Whether there is another."""
        if self._next is None:
            self._next = next(self._works, None)
        return self._next is not None

    def next(self) -> TaskBatch | None:
        """The next, None where there is no other."""
        found = self._next if self.more() else None
        self._next = None
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
