"""Shards of a job, each a flow run of the shard deployment that Prefect schedules and that sends Prefect's heartbeats.

A job's shards are the unfinished runs whose parent is the job's flow run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.events.filters import EventAnyResourceFilter, EventFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling

from ...sandbox.queries.budget import Usage
from ..orphans import PAGE_SIZE, read_flow_runs

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State

HEARTBEAT_SECONDS = 30  # the shortest interval of Prefect's heartbeats
HEARTBEAT_ENVIRONMENT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}
UNFINISHED_STATES = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED)
STARTED_STATES = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@dataclass(slots=True)
class Shard:
    """One shard, the executions from `start` up to `stop`, and the flow run of its current or last attempt."""

    number: int
    start: int
    stop: int
    attempt: int = 0
    run_id: UUID | None = None
    state: Any = None  # the last known state of the flow run
    event_id: UUID | None = None  # the last known event of the flow run
    changed_at: float = 0.0  # the time of the last sign of life, by the event loop's clock
    unfinished_at_start: int = 0  # executions without an outcome when the attempt began
    fruitless_attempts: int = 0  # the number of attempts in a row without any outcome
    is_deleted: bool = False  # True if the server no longer has the flow run
    spent: Usage = field(default_factory=Usage)  # of all attempts, as far as the ledger has it

    @property
    def has_ended(self) -> bool:
        """True if the flow run has ended, or was deleted."""
        return self.is_deleted or (self.state is not None and self.state.is_final())

    @property
    def is_running(self) -> bool:
        """True if the flow run's process has begun its work."""
        return self.state is not None and self.state.type == StateType.RUNNING

    @property
    def has_started(self) -> bool:
        """True if a worker has taken the flow run."""
        return self.state is not None and self.state.type in STARTED_STATES


async def poll_states(client: PrefectClient, shards: Iterable[Shard]) -> None:
    """Update `state` and `is_deleted` of shards. Raises httpx.HTTPError."""
    by_id = {shard.run_id: shard for shard in shards if shard.run_id is not None}
    runs = await read_flow_runs(client, by_id)
    for run_id, shard in by_id.items():
        run = runs.get(run_id)
        shard.is_deleted = run is None
        if run is not None and run.state is not None and (shard.state is None or run.state.id != shard.state.id):
            shard.state, shard.changed_at = run.state, asyncio.get_running_loop().time()


async def poll_heartbeats(client: PrefectClient, shards: Iterable[Shard]) -> None:
    """Update `changed_at` of shards whose flow runs have new events. Raises httpx.HTTPError."""
    for shard in list(shards):
        of_this_run = EventAnyResourceFilter(id=[f"prefect.flow-run.{shard.run_id}"])
        page = await client.read_events(EventFilter(any_resource=of_this_run), limit=1)
        for event in page.events:  # the latest event
            if event.id != shard.event_id:
                shard.event_id, shard.changed_at = event.id, asyncio.get_running_loop().time()


async def cancel_runs(client: PrefectClient, jobs: Iterable[UUID]) -> list[Shard]:
    """Cancel the unfinished shards of jobs, which are ids of flow runs. Return the shards. Raises httpx.HTTPError.

    A running flow run becomes Cancelling, and any other Cancelled: a worker ignores Cancelling while it starts the
    process (Prefect 3.8). If the process of a cancelled run still starts, it finds the cancellation, and ends.
    """
    only = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=list(jobs)),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED_STATES))),
    )
    asked = dict[UUID, Shard]()
    while runs := await client.read_flow_runs(flow_run_filter=only, limit=PAGE_SIZE):
        if not (new := [run for run in runs if run.id not in asked]):
            break
        for run in new:
            asked[run.id] = Shard(0, 0, 0, run_id=run.id, state=run.state)
            has_begun = run.state_type not in (StateType.SCHEDULED, StateType.PENDING)
            with suppress(ObjectNotFound):
                await client.set_flow_run_state(run.id, Cancelling() if has_begun else Cancelled())
    return list(asked.values())


async def cancel_shards(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the unfinished shards of a cancelled flow run: a hook for runs whose process could not do so."""
    if (flow_run.parameters or {}).get("shards") is not None:
        async with get_client() as client:
            await cancel_runs(client, [flow_run.id])
