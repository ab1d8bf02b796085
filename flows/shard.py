"""The shard flow: one shard of a job, on whatever worker takes it. People do not run it; jobs with `shards` do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from pydantic import Field

from ..blocks.provider import SandboxProvider
from ..blocks.registry import resolve_provider
from ..sandbox.errors import ConfigurationError, NotRun, RlmBatchError
from ..sandbox.result import Failure
from ..tasks.execution import Execution
from ..tasks.ledger.ledger import Ledger
from ..tasks.ledger.shard_files import Heartbeat, ShardFiles, ShardHeader
from .decorator import batch_flow
from .engine.job import Outcome, Run, with_volume
from .engine.labels import LABELS, execution_label
from .engine.outcome_store import Counted
from .parameters import Options, VolumeName

BEAT = 10.0  # seconds between two signs of life


@batch_flow("shard")
async def shard(
    work: Annotated[str, Field(description="The file that says what is to be done, in the ledger of the job")],
    options: Annotated[Options, Field(description="The job's parameters, as they are for this shard")],
    volume_name: VolumeName = None,
) -> None:
    """Runs the executions of one shard, and writes their outcomes to the ledger of its job, which gathers them.

    It ends Completed whatever became of the executions: their failures are the job's to tell. Raises NotRun where the
    job has begun this shard anew meanwhile, and ConfigurationError where it cannot be run on this worker.
    """
    async with _Beating(ShardFiles.from_work_path(work)) as beating:
        head, executions = beating.portion.read_work()
        block = await resolve_provider(options.provider)
        if volume_name is not None:
            block = with_volume(block, volume_name)
        if head.commit is not None:
            block.pin(head.commit)
        async with _ShardRun.of(block, head, options) as run:
            beating.run = run
            await run.drive(executions)


class _ShardRun(Run):
    """A run that has no results of its own: they are the job's, which reads them from the ledger."""

    counted: Counted

    @classmethod
    @asynccontextmanager
    async def of(cls, provider: SandboxProvider, head: ShardHeader, options: Options) -> AsyncIterator[_ShardRun]:
        """A run of what the head says, with the ledger of its job open. Raises ConfigurationError."""
        isolation = await provider.check()
        assert options.results_path is not None
        ledger = Ledger(options.results_path, head.part_prefix)
        try:
            await asyncio.to_thread(ledger.create)
        except ConfigurationError as error:
            raise OSError(str(error)) from error  # of this worker, or for now: the job could make it
        run = await cls.made(provider, ledger, options, head.total, LABELS.get(head.what, execution_label))
        run.kept = run.counted = Counted()
        run.knows(await asyncio.to_thread(ledger.load_latest_lines, head.part_prefix))
        run.log.info(
            "shard %d of %d: %d executions on %s: %s; results in %s",
            head.shard + 1,
            head.shards,
            head.total,
            provider.provider_name,
            isolation,
            ledger.path,
        )
        try:
            async with run.ready():
                yield run
        except BaseException:
            with run.said():
                await asyncio.shield(run.shut())
            raise
        await run.shut()

    def tell(self, execution: Execution, outcome: Outcome, *, cached: bool = False) -> None:
        if isinstance(outcome, Failure):
            self.say_failed(execution, outcome)


class _Beating:
    """The sign of life of one attempt at a shard, an async context manager, which ends when the attempt is given up.

    Raises NotRun where a later attempt at the same shard has begun: nobody waits for this one any more.
    """

    def __init__(self, portion: ShardFiles) -> None:
        self.portion = portion
        self.run: _ShardRun | None = None
        self._beat = Heartbeat()
        self._lock = threading.Lock()
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Beating:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._go_on())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            cause = errors.exceptions[0]
            if isinstance(cause, RlmBatchError):
                self._beat.error = (type(cause).__name__, str(cause))
            raise cause from None
        finally:
            with suppress(OSError):
                await asyncio.shield(asyncio.to_thread(self._write))

    async def _go_on(self) -> None:
        while True:
            with suppress(OSError):  # where it cannot be written, nor can results, and those tell
                await asyncio.to_thread(self._write)
            if await asyncio.to_thread(self._replaced):
                raise NotRun("this shard was silent for so long that its job has begun it anew: this attempt ends")
            await asyncio.sleep(BEAT)

    def _replaced(self) -> bool:
        with suppress(OSError):
            return self.portion.next_attempt.has_work()
        return False

    def _write(self) -> None:
        with self._lock:  # a beat that is still on its way is not to come after the last
            self._write_now()

    def _write_now(self) -> None:
        beat, run = self._beat, self.run
        beat.count += 1
        if run is not None:
            beat.done, beat.failed, beat.late = (
                run.counted.outcome_count,
                run.counted.failure_count,
                run.counted.late_count,
            )
            beat.sandboxes, beat.sandbox_seconds = run.opened, run.open_seconds
            if run.asking is not None:
                used = run.asking.spent.usage
                beat.calls, beat.cost = used.calls, used.cost
                beat.prompt_tokens, beat.completion_tokens = used.prompt_tokens, used.completion_tokens
        self.portion.write_heartbeat(beat)
