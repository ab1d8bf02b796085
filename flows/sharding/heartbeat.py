"""The heartbeat of an attempt at a shard: it tells the job that the attempt is alive, and its progress."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ...sandbox.errors import DeadlineExceeded, NotRun, RlmBatchError
from ...sandbox.result import Failure, Outcome
from ...tasks.execution import Execution
from ...tasks.ledger.shard_files import Heartbeat, ShardFiles
from ..engine.context import RunContext

HEARTBEAT_INTERVAL_SECONDS = 10.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0  # A running shard without a heartbeat for so long counts as dead.


class ShardCancelled(NotRun):
    """The job has cancelled the shard."""


class HeartbeatWriter:
    """A counter of an attempt's outcomes, which writes the counts as the heartbeat, at intervals."""

    def __init__(self, files: ShardFiles) -> None:
        self.context: RunContext | None = None  # the flow run whose usage is reported, once it is open
        self._files = files
        self._heartbeat = Heartbeat()
        self._lock = threading.Lock()

    def add_outcome(self, execution: Execution, outcome: Outcome) -> None:
        """Count the outcome of an execution."""
        # The ledger does not have these failures.
        if isinstance(outcome, Failure) and isinstance(outcome.error, DeadlineExceeded | NotRun):
            self._heartbeat.late += isinstance(outcome.error, DeadlineExceeded)
            return
        self._heartbeat.done += 1
        self._heartbeat.failed += isinstance(outcome, Failure)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Write the heartbeat regularly until the context ends, and once more at the end.

        Raises:
            ShardCancelled: The job has cancelled the attempt.
            NotRun: A later attempt at the shard has begun.
        """
        await asyncio.to_thread(self._check_if_wanted)  # A cancelled attempt opens no sandbox.
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._write_regularly())
                yield
                task.cancel()
        except BaseExceptionGroup as errors:
            cause = errors.exceptions[0]
            if isinstance(cause, RlmBatchError):
                self._heartbeat.error = (type(cause).__name__, str(cause))
            raise cause from None
        finally:
            self._heartbeat.ended = True
            with suppress(OSError):
                await asyncio.shield(asyncio.to_thread(self._write))

    async def _write_regularly(self) -> None:
        while True:
            with suppress(OSError):  # Then writes of results fail too, and raise.
                await asyncio.to_thread(self._write)
            await asyncio.to_thread(self._check_if_wanted)
            await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    def _check_if_wanted(self) -> None:
        """Raise NotRun if the job no longer waits for this attempt."""
        with suppress(OSError):
            if self._files.is_cancelled():
                raise ShardCancelled("the job has cancelled this shard")
            if self._files.next_attempt.has_work():
                raise NotRun("this shard was silent for too long, and its job started it again: this attempt ends")

    def _write(self) -> None:
        with self._lock:  # A write in another thread must not end after the last heartbeat.
            heartbeat, context = self._heartbeat, self.context
            heartbeat.count += 1
            if context is not None:
                heartbeat.sandboxes, heartbeat.sandbox_seconds = context.usage.sandboxes, context.usage.sandbox_seconds
            if context is not None and context.model_access is not None:
                used = context.model_access.spent.usage
                heartbeat.calls, heartbeat.cost = used.calls, used.cost
                heartbeat.prompt_tokens, heartbeat.completion_tokens = used.prompt_tokens, used.completion_tokens
            self._files.write_heartbeat(heartbeat)
