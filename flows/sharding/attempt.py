"""Attempts at shards: each is a flow run of the shard deployment, with files in the ledger of the job.

A flow run has an idempotency key that the ledger, the job and the attempt decide, so that a job that is run again on
its ledger finds the shards that its predecessor has left running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling, Crashed

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...tasks.execution import Execution
from ...tasks.ledger.shard_files import Heartbeat, ShardFiles, ShardHeader
from ..cleanup.orphans import PAGE_SIZE, read_flow_runs
from ..inputs.host_paths import locate_ledger

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

UNFINISHED_STATES = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED)
STARTED_STATES = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@dataclass(slots=True)
class Shard:
    """One shard, numbers from `start` up to `stop`, and the attempt at it that is under way or was the last."""

    number: int
    start: int
    stop: int
    attempt: int = 0
    files: ShardFiles | None = None
    run_id: UUID | None = None
    state: Any = None  # of the attempt's flow run, as the server told it last
    heartbeat: Heartbeat | None = None
    changed_at: float = 0.0  # when its heartbeat or its state changed last, by the event loop's clock
    unfinished_at_start: int = 0  # executions without an outcome when the attempt began
    fruitless_attempts: int = 0  # in a row, without any outcome
    is_adopted: bool = False  # a predecessor of this job has started it
    is_deleted: bool = False  # the server has its flow run no longer
    ended_heartbeats: list[Heartbeat] = field(default_factory=list[Heartbeat])  # the last of each attempt that is over

    @property
    def is_final(self) -> bool:
        """Whether the attempt's flow run has ended, or has gone from the server."""
        return self.is_deleted or (self.state is not None and self.state.is_final())

    @property
    def has_ended(self) -> bool:
        """Whether the attempt has ended its work, although its worker may still run hooks and report the state."""
        return self.is_final or (self.heartbeat is not None and self.heartbeat.ended)

    @property
    def has_started(self) -> bool:
        """Whether a worker has taken the attempt's flow run."""
        return self.state is not None and self.state.type in STARTED_STATES

    def watch(self, files: ShardFiles, run: FlowRun) -> None:
        """From now on this flow run is the attempt."""
        self.files, self.run_id, self.state = files, run.id, run.state
        self.changed_at = asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class AttemptRuns:
    """The flow runs of one job's attempts on the Prefect server."""

    client: PrefectClient
    deployment_id: UUID
    ledger: PathOrLocation
    ledger_id: str
    job_id: str

    def locate_files(self, shard: Shard) -> ShardFiles:
        """The files of the shard's current attempt."""
        return ShardFiles(self.ledger, self.job_id, shard.number, shard.attempt)

    async def find_unfinished(self, shard: Shard) -> FlowRun | None:
        """The flow run of the last attempt at a shard, if it is not over; None where a new one is to be started."""
        files = self.locate_files(shard)
        run = await self._find_run(files)
        if run is None:
            if await asyncio.to_thread(lambda: files.read_heartbeat() is None and not files.is_cancelled()):
                shard.attempt -= 1  # its work was written, and no run was made of it
        elif run.state is None or not (run.state.is_final() or run.state.is_cancelling()):
            return run
        return None

    async def start(
        self,
        files: ShardFiles,
        header: ShardHeader,
        executions: Iterable[Execution],
        *,
        name: str,
        options: dict[str, Any],
        volume_name: str | None,
        files_digest: str | None,
    ) -> FlowRun:
        """Writes an attempt's work, and starts its flow run. Raises OSError, and httpx.HTTPError."""
        try:
            await asyncio.to_thread(files.write_work, header, executions)
        except OSError as error:
            # With one argument, or its text would begin with a number in brackets.
            raise OSError(
                f"the work of a shard could not be written to {files.work_path}: {error.strerror or error}. What has a "
                "result stays: see to that place, and run again with the same results_path"
            ) from error
        parameters: dict[str, Any] = {"work": str(files.work_path), "options": options, "volume_name": volume_name}
        if files_digest is not None:
            parameters["files_digest"] = files_digest
        return await arun_deployment(
            self.deployment_id,
            client=self.client,
            parameters=parameters,
            flow_run_name=name,
            timeout=0,
            idempotency_key=self._build_idempotency_key(files),
        )

    async def poll_states(self, shards: Iterable[Shard]) -> None:
        """Updates the shards' states, and which of their flow runs were deleted. Raises httpx.HTTPError."""
        by_id = {shard.run_id: shard for shard in shards if shard.run_id is not None}
        runs = await read_flow_runs(self.client, by_id)
        for run_id, shard in by_id.items():
            run = runs.get(run_id)
            shard.is_deleted = run is None
            if run is not None and run.state is not None and (shard.state is None or run.state.id != shard.state.id):
                shard.state, shard.changed_at = run.state, asyncio.get_running_loop().time()

    async def report_crash(self, shard: Shard, reason: str) -> None:
        """Tells the server that the attempt's process has gone, if the server can be told."""
        assert shard.run_id is not None
        with suppress(httpx.HTTPError, ObjectNotFound):
            await self.client.set_flow_run_state(shard.run_id, Crashed(message=reason), force=True)

    async def cancel(self, shard: Shard) -> None:
        """Cancels the attempt, also one whose flow run was just being made."""
        if shard.files is not None:
            with suppress(OSError):
                await asyncio.to_thread(shard.files.mark_cancelled)
        with suppress(httpx.HTTPError, ObjectNotFound):
            if shard.run_id is None and shard.files is not None:
                run = await self._find_run(shard.files)
                shard.run_id = run.id if run is not None else None
            if shard.run_id is not None:
                await _cancel_run(self.client, await self.client.read_flow_run(shard.run_id))

    async def _find_run(self, files: ShardFiles) -> FlowRun | None:
        key = FlowRunFilterIdempotencyKey(any_=[self._build_idempotency_key(files)])
        runs = await self.client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key), limit=1)
        return runs[0] if runs else None

    def _build_idempotency_key(self, files: ShardFiles) -> str:
        # Two ledgers may have the same job, each its own shards; and one may be removed and be made anew.
        return f"rlm-batch {self.ledger_id} {files.job} {files.shard} {files.attempt}"


async def _cancel_run(client: PrefectClient, run: FlowRun) -> None:
    """Sets a flow run that runs to Cancelling, for which its worker ends the process, and any other to Cancelled.

    A worker overlooks Cancelling while it starts the process (Prefect 3.8), and the run would keep that state. A
    process that starts all the same finds the mark of its `ShardFiles`, and ends.
    """
    has_begun = run.state_type not in (StateType.SCHEDULED, StateType.PENDING)
    await client.set_flow_run_state(run.id, Cancelling() if has_begun else Cancelled())


async def cancel_shards(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancels what is left of a cancelled flow run's shards: a hook, for when its process could not do that itself.

    Prefect hands over its arguments by these names.
    """
    if (flow_run.parameters or {}).get("shards") is None:
        return
    only = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED_STATES))),
    )
    asked = set[UUID]()
    async with get_client() as client:
        while runs := await client.read_flow_runs(flow_run_filter=only, limit=PAGE_SIZE):
            if not (new := [run for run in runs if run.id not in asked]):
                break
            for run in new:
                asked.add(run.id)
                with suppress(ConfigurationError, OSError):
                    files = ShardFiles.from_work_path(run.parameters.get("work", ""))
                    await asyncio.to_thread(replace(files, ledger=locate_ledger(files.ledger)).mark_cancelled)
                with suppress(ObjectNotFound):
                    await _cancel_run(client, run)
