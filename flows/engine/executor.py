"""The executor of a flow run's executions: concurrent lanes, each of which creates one task run after another."""

import asyncio
import itertools
import math
from collections import deque
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
    is_over: bool = False  # True if no further execution starts, and the remaining executions fail
    _batches: Iterator[TaskBatch] = field(init=False)  # makes the batches one by one
    _queue: deque[TaskBatch] = field(default_factory=deque[TaskBatch])  # the next batch, once it is made
    _taken: list[TaskBatch] = field(default_factory=list[TaskBatch])  # unfinished batches that a lane has taken
    _creation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a task run is being created

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        run = self.run
        per_task = run.options.executions_per_task or max(1, math.ceil(run.plan.total / MAX_TASK_RUNS))
        lane_count = min(run.options.max_workers, math.ceil(run.plan.total / per_task))
        tags = build_tags(run.provider.provider_name)
        if not await has_tag_limit(tags):
            tags = set()
        task = configure_task(execute, run.options, tags, per_task)
        self._batches = self._make_batches(executions, find_result, per_task)
        self._creation_lock = asyncio.Lock()
        try:
            async with (
                asyncio.timeout_at(run.stop.ends_at),
                nullcontext() if run.turn_calls is None else run.turn_calls.open(),
                asyncio.TaskGroup() as group,
            ):
                for _ in range(lane_count):
                    group.create_task(self._run_lane(task))
        except TimeoutError:
            await self._fail_unfinished(run.stop.build_error)
        except BaseException as error:
            with suppress(OSError):
                for batch in self._taken:
                    for execution in batch.remaining_executions:
                        run.sink.save_queries(execution)
            if isinstance(error, BaseExceptionGroup):
                raise find_first_error(error) from None
            raise
        refusal = run.slots.admission.error
        if refusal is not None:
            text = (
                f"not started: the provider opened no sandbox for {run.provider.start_timeout} s "
                f"({refusal.text}); {describe_rerun()} later"
            )
            await self._fail_unfinished(lambda _: type(refusal)(text), is_written=True)
        if run.stop.has_too_many_failures:
            await self._fail_unfinished(run.stop.build_error)

    def _make_batches(
        self, executions: Iterator[Execution], find_result: FindResult, per_task: int
    ) -> Iterator[TaskBatch]:
        """Group the executions that have no result yet, and record the results of the others."""
        new = (execution for execution in executions if not self._record_earlier(execution, find_result(execution)))
        while group := list(itertools.islice(new, per_task)):
            label = self.run.plan.label(group[0])
            if len(group) > 1:
                label += f" and {len(group) - 1} more"
            yield TaskBatch(label, group, on_start=self._creation_lock.release)

    def _record_earlier(self, execution: Execution, result: Result | None) -> bool:
        """Record an execution's result from an earlier run. Return whether there is one."""
        if result is None:
            return False
        result = with_index(result, execution.index, execution.place, is_reduction=execution.is_reduction)
        self.run.sink.record_cached(execution, result)
        self.run.sink.raise_error()
        return True

    def _has_batch(self) -> bool:
        """Return whether a batch is in the queue. Make the next batch if the queue is empty."""
        if not self._queue:
            self._queue.extend(itertools.islice(self._batches, 1))
        return bool(self._queue)

    async def _run_lane(self, task: Any) -> None:
        lane = Lane(self.run, self.run.slots)
        try:
            # Acquire the slot first. A batch without a slot would wait, while other lanes have nothing to do.
            while self._may_start() and self._has_batch() and await lane.acquire():
                if not self._has_batch():  # Other lanes have taken the batches meanwhile.
                    break
                batch = self._queue.popleft()
                self._taken.append(batch)
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
        """Create the task run of a batch, and wait for its end. Raise an error that ends the flow run."""
        for execution in batch.remaining_executions:
            self.run.listener.on_execution_start(execution.index)
        # Before a task run begins its work, Prefect asks the server for the limits of its tags. If the server does not
        # answer, Prefect retries for a minute for each waiting task run in turn, even for cancelled ones, and the
        # process cannot end. Lanes create task runs one at a time, and a task run that cannot begin ends the flow run.
        await self._creation_lock.acquire()  # The batch's `on_start` releases it.
        state = await task(lane, batch, return_state=True)
        self.run.sink.raise_error()
        if state.is_cancelled():
            raise asyncio.CancelledError
        if not batch.remaining_executions:
            self._taken.remove(batch)
            return
        if self.run.stop.has_too_many_failures:
            return
        error = await state.result(raise_on_failure=False)
        is_refused = isinstance(error, (ProviderUnusable, SandboxStartError, QuotaExceeded))
        if is_refused and self.run.slots.admission.error is not None:
            return  # `execute_all` fails the remaining executions.
        if isinstance(error, ProviderUnusable) and error.__cause__ is not None:
            raise error.__cause__
        if isinstance(error, BaseException):
            raise error
        raise RuntimeError(f"a task run ended as {state.name} before its executions were done: {state.message}")

    async def _fail_unfinished(
        self, build_error: Callable[[Execution], RlmBatchError], *, is_written: bool = False
    ) -> None:
        """Record an error for each execution without an outcome, also in the ledger if `is_written`."""
        self.is_over = True
        for batch in itertools.chain(self._taken, self._queue, self._batches):
            for execution in batch.remaining_executions:
                self.run.sink.record_unrun(execution, build_error(execution), is_written=is_written)
                await asyncio.sleep(0)  # There may be many executions, and others use this event loop.
        self._taken.clear()
        self._queue.clear()
