"""Attempts at shards: each is a flow run of the shard deployment, with files in the ledger of the job.

The ledger, the job and the attempt decide a flow run's idempotency key, so a job that is run again on its ledger finds
its shards that are still running.
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
from ..inputs.host_paths import locate_ledger
from ..orphans import PAGE_SIZE, read_flow_runs

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

UNFINISHED_STATES = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED)
STARTED_STATES = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@dataclass(slots=True)
class Shard:
    """One shard, the executions from `start` up to `stop`, and its current or last attempt."""

    number: int
    start: int
    stop: int
    attempt: int = 0
    files: ShardFiles | None = None
    run_id: UUID | None = None
    state: Any = None  # the last known state of the attempt's flow run
    heartbeat: Heartbeat | None = None
    changed_at: float = 0.0  # the time of the last change of heartbeat or state, by the event loop's clock
    unfinished_at_start: int = 0  # executions without an outcome when the attempt began
    fruitless_attempts: int = 0  # the number of attempts in a row without any outcome
    is_adopted: bool = False  # True if an earlier process of this job has started the attempt
    is_deleted: bool = False  # True if the server no longer has the flow run
    ended_heartbeats: list[Heartbeat] = field(default_factory=list[Heartbeat])  # the last one of each ended attempt

    @property
    def has_ended(self) -> bool:
        """True if the attempt has ended its work, although its worker may still run hooks and report the state."""
        is_final = self.is_deleted or (self.state is not None and self.state.is_final())
        return is_final or (self.heartbeat is not None and self.heartbeat.ended)

    @property
    def has_started(self) -> bool:
        """True if a worker has taken the attempt's flow run."""
        return self.state is not None and self.state.type in STARTED_STATES

    def watch(self, files: ShardFiles, run: FlowRun) -> None:
        """Use a flow run as the shard's attempt."""
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
        """Return the files of the shard's current attempt."""
        return ShardFiles(self.ledger, self.job_id, shard.number, shard.attempt)

    async def find_unfinished(self, shard: Shard) -> FlowRun | None:
        """Return the flow run of a shard's last attempt; None if it has ended or was never created."""
        files = self.locate_files(shard)
        run = await self._find_run(files)
        if run is None:
            if await asyncio.to_thread(lambda: files.read_heartbeat() is None and not files.is_cancelled()):
                shard.attempt -= 1  # The attempt's work was written, but its run was not created.
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
        """Write an attempt's work, and start its flow run. Raises OSError and httpx.HTTPError."""
        try:
            await asyncio.to_thread(files.write_work, header, executions)
        except OSError as error:
            # An OSError with two arguments would show a number in brackets.
            raise OSError(
                f"a shard's work could not be written to {files.work_path}: {error.strerror or error}. "
                "Finished results stay: correct the place, and run again with the same results_path"
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
        """Update `state` and `is_deleted` of shards. Raises httpx.HTTPError."""
        by_id = {shard.run_id: shard for shard in shards if shard.run_id is not None}
        runs = await read_flow_runs(self.client, by_id)
        for run_id, shard in by_id.items():
            run = runs.get(run_id)
            shard.is_deleted = run is None
            if run is not None and run.state is not None and (shard.state is None or run.state.id != shard.state.id):
                shard.state, shard.changed_at = run.state, asyncio.get_running_loop().time()

    async def report_crash(self, shard: Shard, reason: str) -> None:
        """Set the attempt's flow run to Crashed, if the server answers."""
        assert shard.run_id is not None
        with suppress(httpx.HTTPError, ObjectNotFound):
            await self.client.set_flow_run_state(shard.run_id, Crashed(message=reason), force=True)

    async def cancel(self, shard: Shard) -> None:
        """Cancel the attempt, even if its flow run was just being created."""
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
        # The ledger's id differs between ledgers with the same job, and after a ledger was deleted.
        return f"rlm-batch {self.ledger_id} {files.job} {files.shard} {files.attempt}"


async def _cancel_run(client: PrefectClient, run: FlowRun) -> None:
    """Set a running flow run to Cancelling, so that its worker ends the process, and any other to Cancelled.

    A worker ignores Cancelling while it starts the process (Prefect 3.8), and the run would stay in that state. If the
    process of a cancelled run still starts, it finds the cancellation mark in its `ShardFiles`, and ends.
    """
    has_begun = run.state_type not in (StateType.SCHEDULED, StateType.PENDING)
    await client.set_flow_run_state(run.id, Cancelling() if has_begun else Cancelled())


async def cancel_shards(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the unfinished shards of a cancelled flow run: a hook for runs whose process could not do so.

    Prefect passes the arguments by name.
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
