"""The executor of a flow run's executions in this process: lanes that make task runs of them."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...sandbox.errors import RlmBatchError, SandboxStartError
from ...sandbox.result import Outcome, Result
from ...tasks.capacity.slots import Slots
from ...tasks.execute import configure_task, execute
from ...tasks.execution import Execution, with_index
from ...tasks.lane import Lane, ProviderUnusable
from ...tasks.task_batch import TaskBatch
from ...tasks.task_log import LineBudget
from ..parameters import MAX_TASK_RUNS
from .context import RunContext
from .events import OutcomeRecorder
from .failures import FailureWatch, describe_rerun, find_first_error

FindResult = Callable[[Execution], Result | None]


class Executor(Protocol):
    """Runs a flow run's executions: in this process, or in shards."""

    @property
    def is_over(self) -> bool:
        """Whether no further execution is started."""
        ...

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        """Run the executions that have no result yet, and return when each of these executions has an outcome.

        Args:
            executions: The executions, in the order of their indices.
            find_result: A function that looks up an earlier result.
        """
        ...


@dataclass(slots=True, kw_only=True)
class LaneExecutor:
    """Executes in this process: `max_workers` lanes at most, each of which makes one task run after the other.

    `slots` are what lanes wait for, `uploads` are files that each execution finds, by their paths there. With a
    `state_context` all executions share one process and its state. With `stop_on_failure` no task run is made after one
    that failed, and what is left has no outcome.
    """

    context: RunContext
    slots: Slots
    recorder: OutcomeRecorder
    uploads: dict[str, Path] | None = None
    state_context: str | None = None
    stop_on_failure: bool = False
    _line_budget: LineBudget = field(default_factory=LineBudget)
    _in_flight: dict[int, Execution] = field(default_factory=dict[int, Execution])
    _failures: FailureWatch = field(init=False)
    is_over: bool = False  # nothing more is begun: what is left fails
    _is_out_of_time: bool = False  # the provider asked a lane to wait for longer than there is time
    _creation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # until a task run that is being made started

    def __post_init__(self) -> None:
        self._failures = FailureWatch(self.context.options.max_failures, self.context.total)

    async def execute_all(self, executions: Iterator[Execution], find_result: FindResult) -> None:
        options = self.context.options
        per_task = options.executions_per_task or max(1, math.ceil(self.context.total / MAX_TASK_RUNS))
        batches = _Peekable(self._group_executions(self._skip_cached(executions, find_result), per_task))
        task = await configure_task(execute, self.context.policy, self.context.provider.provider_name, per_task)
        self._creation_lock = asyncio.Lock()
        try:
            async with asyncio.timeout_at(self.context.deadline.at), asyncio.TaskGroup() as group:
                for _ in range(min(options.max_workers, math.ceil(self.context.total / per_task))):
                    group.create_task(self._run_lane(task, batches))
        except TimeoutError:
            reason = "passed before this execution had ended"
            await self._fail_unfinished(batches, partial(self.context.deadline.build_error, reason=reason))
        except BaseExceptionGroup as errors:
            raise find_first_error(errors) from None
        if self._is_out_of_time:
            reason = "is over before the provider opens more sandboxes"
            await self._fail_unfinished(batches, partial(self.context.deadline.build_error, reason=reason))
        if (refusal := self.slots.admission.error) is not None:
            await self._fail_refused(batches, refusal)
        if self._failures.is_limit_reached:
            await self._fail_unfinished(batches, self._failures.build_error)

    async def _run_lane(self, task: Any, batches: "_Peekable") -> None:
        lane = self.context.make_lane(self.slots, self.uploads, self.state_context)
        try:
            # A slot first: a batch that is taken before would wait for it while other lanes have nothing to do.
            while self._may_go_on() and batches.has_next() and await lane.acquire():
                batch = batches.pop_next()
                if batch is None:
                    break
                if not await self._run_batch(task, lane, batch):
                    return
                await lane.release_if_wanted()
            self.slots.dismiss_waiters()
        finally:
            await self.context.usage.close_lane(lane)

    def _may_go_on(self) -> bool:
        if self.slots.admission.error is not None or self._failures.is_limit_reached:
            return False
        return not (self._failures.count and self.stop_on_failure)

    async def _run_batch(self, task: Any, lane: Lane, batch: TaskBatch) -> bool:
        """Makes the task run of a batch; False where the lane cannot go on in time. Raises what ends the flow run."""
        for execution in batch.remaining_executions:
            self.recorder.listener.on_execution_start(execution.index)
        # Before a task run begins its work, Prefect asks the server for the limits of its tags. Where the server is
        # away it does so for a minute for each that waits, one after the other, also for those that nobody wants any
        # more: the process would not end before. So they are made one by one; one that does not begin is the end of
        # the flow run, and no other is made after it.
        await self._creation_lock.acquire()
        state = await task(lane, batch, return_state=True)
        if state.is_cancelled():
            raise asyncio.CancelledError
        if batch.remaining_executions and not self._failures.is_limit_reached:
            error = await state.result(raise_on_failure=False)
            if isinstance(error, RlmBatchError) and self.context.policy.is_too_late(error):
                self._is_out_of_time = True
                self.slots.dismiss_waiters()  # nor do those that wait for a sandbox get one in time
                return False
            if isinstance(error, ProviderUnusable) and isinstance(error.__cause__, RlmBatchError):
                admission = self.slots.admission
                if admission.error is None and (self.stop_on_failure or not admission.has_opened_sandbox):
                    raise error.__cause__
                self.slots.end(error.__cause__)
                return False
            if self._end_if_provider_is_away(lane, batch):
                return False
            if isinstance(error, BaseException):
                raise error
            raise RuntimeError(f"a task run ended as {state.name} with executions undone: {state.message}")
        return not self._end_if_provider_is_away(lane, batch)

    def _end_if_provider_is_away(self, lane: Lane, batch: TaskBatch) -> bool:
        """Whether a batch's last failure found no sandbox for so long; if so, the run opens none any more."""
        # Of those that stop on a failure the rest is not begun anyway.
        if self.stop_on_failure or not isinstance(batch.last_error, SandboxStartError):
            return False
        if not lane.is_start_timeout_over:
            return False
        self.slots.end(batch.last_error)
        return True

    def _skip_cached(self, executions: Iterator[Execution], find_result: FindResult) -> Iterator[Execution]:
        """The executions without a result; the others are recorded as they come by."""
        for execution in executions:
            result = find_result(execution)
            if result is None:
                self._in_flight[execution.index] = execution
                yield execution
            else:
                self.recorder.record(execution, with_index(result, execution.index), cached=True)

    def _group_executions(self, executions: Iterator[Execution], per_task: int) -> Iterator[TaskBatch]:
        while group := list(itertools.islice(executions, per_task)):
            label = self.context.label(group[0])
            if len(group) > 1:
                label = f"{label} and {len(group) - 1} more"
            yield TaskBatch(
                label,
                group,
                self.context.policy,
                ledger=self.context.ledger,
                on_outcome=self._record_ended,
                should_end=lambda: self._failures.is_limit_reached,
                on_start=self._creation_lock.release,
                on_output=self.recorder.listener.on_output,
                line_budget=self._line_budget if self.context.options.log_output else None,
            )

    def _record_ended(self, execution: Execution, outcome: Outcome) -> None:
        """Records what a task run has brought about."""
        self._record_outcome(execution, outcome)
        if (warning := self._failures.add_outcome(outcome)) is not None:
            self.recorder.warn(warning)

    def _record_outcome(self, execution: Execution, outcome: Outcome) -> None:
        del self._in_flight[execution.index]
        self.recorder.record(execution, outcome)

    async def _fail_unfinished(self, batches: "_Peekable", build_error: Callable[[Execution], RlmBatchError]) -> None:
        """What has no outcome fails with that. It is not written to the ledger: it may be run yet."""
        self.is_over = True
        while (batch := batches.pop_next()) is not None:
            for execution in batch.remaining_executions:
                self.recorder.listener.on_execution_start(execution.index)
        for execution in list(self._in_flight.values()):
            self.recorder.record_failure(execution, build_error(execution))
            await asyncio.sleep(0)  # there may be many, and others use this loop
        self._in_flight.clear()

    async def _fail_refused(self, batches: "_Peekable", refusal: RlmBatchError) -> None:
        """What was not begun fails with what the provider said last; the ledger has it, so that a report tells."""
        self.is_over = True
        seconds = self.context.provider.start_timeout
        text = (
            f"not begun, for the provider has opened no sandbox for {seconds} s ({refusal.text}): "
            f"when it does again, {describe_rerun()}"
        )
        while (batch := batches.pop_next()) is not None:
            for execution in batch.remaining_executions:
                self.recorder.listener.on_execution_start(execution.index)
        for execution in list(self._in_flight.values()):
            failure = self.recorder.build_failure(execution, type(refusal)(text))
            self.context.ledger.write_outcome(execution.key, failure)
            self._record_outcome(execution, failure)
            await asyncio.sleep(0)  # there may be many, and others use this loop


class _Peekable:
    """What is still to be done, and whether there is more of it."""

    def __init__(self, batches: Iterator[TaskBatch]) -> None:
        self._batches = batches
        self._next: TaskBatch | None = None

    def has_next(self) -> bool:
        """Whether there is another."""
        if self._next is None:
            self._next = next(self._batches, None)
        return self._next is not None

    def pop_next(self) -> TaskBatch | None:
        """The next, None where there is no other."""
        batch = self._next if self.has_next() else None
        self._next = None
        return batch
