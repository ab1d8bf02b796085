"""The executor of a flow run in this process: its lanes, which make task runs."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from ...sandbox.errors import QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.result import Result
from ...tasks.execution import Execution, with_index
from ...tasks.task_runs import build_tags, has_tag_limit
from ..parameters import MAX_TASK_RUNS
from .execute import TaskBatch, configure_task, execute
from .failures import describe_rerun, find_first_error
from .lane import Lane, ProviderUnusable
from .run import Run

FindResult = Callable[[Execution], Result | None]


@dataclass(slots=True)
class LaneExecutor:
    """An executor with at most `max_workers` lanes in this process. Each lane creates task runs one after another.

    If the plan stops on a failure, no task run is created after a failed one, and the remaining executions have no
    outcome.
    """

    run: Run
    is_over: bool = False  # no further execution starts, and the rest fails
    _batches: Iterator[TaskBatch] = field(init=False)  # batches that no lane has taken
    _next_batch: TaskBatch | None = None  # read ahead from `_batches` to see whether a batch is left
    _unfinished: dict[TaskBatch, None] = field(default_factory=dict[TaskBatch, None])  # taken by a lane, in order
    _creation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a task run is being created

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        options, admission = self.run.options, self.run.slots.admission
        per_task = options.executions_per_task or max(1, math.ceil(self.run.plan.total / MAX_TASK_RUNS))
        self._batches = self._make_batches(executions, find_result, per_task)
        tags = build_tags(self.run.provider.provider_name)
        task = configure_task(execute, self.run.policy, tags if await has_tag_limit(tags) else set(), per_task)
        self._creation_lock = asyncio.Lock()
        try:
            async with (
                asyncio.timeout_at(self.run.stop.ends_at),
                nullcontext() if self.run.turn_calls is None else self.run.turn_calls.open(),
                asyncio.TaskGroup() as group,
            ):
                for _ in range(min(options.max_workers, math.ceil(self.run.plan.total / per_task))):
                    group.create_task(self._run_lane(task))
        except TimeoutError:
            await self._fail_unfinished(self.run.stop.build_error)
        except BaseException as error:
            with suppress(OSError):
                for batch in self._unfinished:
                    for execution in batch.remaining_executions:
                        self.run.sink.save_queries(execution)
            if isinstance(error, BaseExceptionGroup):
                raise find_first_error(error) from None
            raise
        if (refusal := admission.error) is not None:
            text = (
                f"not started: the provider opened no sandbox for {self.run.provider.start_timeout} s "
                f"({refusal.text}); {describe_rerun()} later"
            )
            await self._fail_unfinished(lambda _: type(refusal)(text), is_written=True)
        if self.run.stop.has_too_many_failures:
            await self._fail_unfinished(self.run.stop.build_error)

    def _make_batches(
        self, executions: Iterator[Execution], find_result: FindResult, per_task: int
    ) -> Iterator[TaskBatch]:
        """Group the executions that have no result yet, and record the results of the others."""
        new = (execution for execution in executions if not self._record_earlier(execution, find_result(execution)))
        while group := list(itertools.islice(new, per_task)):
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            yield TaskBatch(f"{self.run.plan.label(group[0])}{more}", group, on_start=self._creation_lock.release)

    def _record_earlier(self, execution: Execution, result: Result | None) -> bool:
        """Record an execution's result from an earlier run. Return whether there is one."""
        if result is not None:
            self.run.sink.record_cached(execution, with_index(result, execution.index, execution.place))
            self.run.sink.raise_error()
        return result is not None

    def _has_batch(self) -> bool:
        if self._next_batch is None:
            self._next_batch = next(self._batches, None)
        return self._next_batch is not None

    def _take_batch(self) -> TaskBatch | None:
        """Take the next batch; None if no batch is left."""
        if not self._has_batch():
            return None
        batch, self._next_batch = self._next_batch, None
        assert batch is not None
        self._unfinished[batch] = None
        return batch

    async def _run_lane(self, task: Any) -> None:
        lane = Lane(self.run, self.run.slots)
        try:
            # Acquire the slot first. A batch without a slot would wait, while other lanes have nothing to do.
            while self._may_start() and self._has_batch() and await lane.acquire():
                batch = self._take_batch()
                if batch is None:
                    break
                await self._run_batch(task, lane, batch)
                await lane.release_if_wanted()
            self.run.slots.dismiss_waiters()
        finally:
            await lane.release()

    def _may_start(self) -> bool:
        stop = self.run.stop
        if self.run.slots.admission.error is not None or stop.has_too_many_failures:
            return False
        return not (stop.failed_count and self.run.plan.stop_on_failure)

    async def _run_batch(self, task: Any, lane: Lane, batch: TaskBatch) -> None:
        """Create the task run of a batch. Raises errors that end the flow run."""
        for execution in batch.remaining_executions:
            self.run.listener.on_execution_start(execution.index)
        # Before a task run begins its work, Prefect asks the server for the limits of its tags. If the server does not
        # answer, Prefect retries for a minute for each waiting task run in turn, even for cancelled ones. The process
        # could not end. So lanes create task runs one at a time, and a task run that cannot begin ends the flow run.
        await self._creation_lock.acquire()
        state = await task(lane, batch, return_state=True)
        self.run.sink.raise_error()
        if state.is_cancelled():
            raise asyncio.CancelledError
        if not batch.remaining_executions:
            del self._unfinished[batch]
        if not batch.remaining_executions or self.run.stop.has_too_many_failures:
            return
        error = await state.result(raise_on_failure=False)
        is_refused = isinstance(error, (ProviderUnusable, SandboxStartError, QuotaExceeded))
        if is_refused and self.run.slots.admission.error is not None:
            return
        if not isinstance(error, BaseException):
            error = RuntimeError(f"a task run ended as {state.name} before its executions were done: {state.message}")
        raise error.__cause__ if isinstance(error, ProviderUnusable) and error.__cause__ else error

    async def _fail_unfinished(
        self, build_error: Callable[[Execution], RlmBatchError], *, is_written: bool = False
    ) -> None:
        """Record an error for each execution without an outcome, also in the ledger if `is_written`."""
        self.is_over = True
        for batch in itertools.chain(list(self._unfinished), iter(self._take_batch, None)):
            for execution in batch.remaining_executions:
                self.run.sink.record_unrun(execution, build_error(execution), is_written=is_written)
                await asyncio.sleep(0)  # There may be many executions, and others use this event loop.
        self._unfinished.clear()
