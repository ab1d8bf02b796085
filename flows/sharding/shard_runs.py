"""Shards of a job, each a flow run of the shard deployment that Prefect schedules and that sends Prefect's heartbeats.

A job's shards are the unfinished runs whose parent is the job's flow run.
"""

from __future__ import annotations

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

HEARTBEAT_SECONDS = 30  # seconds between a shard's own heartbeats; Prefect's come every 180 s
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
    state: Any = None  # the last known state of the flow run; None if the server has no such run
    last_sign: UUID | None = None  # the flow run's latest state or event at the last check for heartbeats
    silent_checks: int = 0  # checks for heartbeats in a row without a new state or event
    unfinished_at_start: int = 0  # executions without an outcome when the attempt began
    fruitless_attempts: int = 0  # attempts in a row without any outcome
    spent: Usage = field(default_factory=Usage)  # the usage of models by all attempts, as far as the ledger has it

    @property
    def has_ended(self) -> bool:
        """True if the flow run has ended, or was deleted."""
        return self.state is None or self.state.is_final()

    @property
    def is_running(self) -> bool:
        """True if the flow run's process has begun its work."""
        return self.state is not None and self.state.type == StateType.RUNNING

    @property
    def has_started(self) -> bool:
        """True if a worker has taken the flow run."""
        return self.state is not None and self.state.type in STARTED_STATES


async def poll_states(client: PrefectClient, shards: Iterable[Shard]) -> None:
    """Update `state` of shards. Raises httpx.HTTPError if the server does not answer."""
    by_id = {shard.run_id: shard for shard in shards if shard.run_id is not None}
    runs = await read_flow_runs(client, by_id)
    for run_id, shard in by_id.items():
        shard.state = runs[run_id].state if run_id in runs else None


async def look_for_heartbeats(client: PrefectClient, shards: Iterable[Shard]) -> None:
    """Update `silent_checks` of shards. A heartbeat is an event of a running shard.

    Raises httpx.HTTPError if the server does not answer.
    """
    for shard in list(shards):
        sign = None if shard.state is None else shard.state.id
        if shard.is_running:
            of_this_run = EventAnyResourceFilter(id=[f"prefect.flow-run.{shard.run_id}"])
            page = await client.read_events(EventFilter(any_resource=of_this_run), limit=1)
            if page.events:
                sign = page.events[0].id  # the latest event
        shard.silent_checks = shard.silent_checks + 1 if sign == shard.last_sign else 0
        shard.last_sign = sign


async def cancel_runs(client: PrefectClient, jobs: Iterable[UUID]) -> set[UUID]:
    """Cancel the unfinished shards of the flow runs with these ids, and return the ids of the shards' flow runs.

    A running shard becomes Cancelling, and any other Cancelled: a worker ignores Cancelling while it starts the process
    (Prefect 3.8). If the process of a cancelled shard still starts, it finds the cancellation, and ends.

    Raises httpx.HTTPError if the server does not answer.
    """
    unfinished_shards = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=list(jobs)),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED_STATES))),
    )
    cancelled: set[UUID] = set()
    while True:
        page = await client.read_flow_runs(flow_run_filter=unfinished_shards, limit=PAGE_SIZE)
        runs = [run for run in page if run.id not in cancelled]
        if not runs:
            return cancelled
        for run in runs:
            cancelled.add(run.id)
            has_begun = run.state_type not in (StateType.SCHEDULED, StateType.PENDING)
            with suppress(ObjectNotFound):
                await client.set_flow_run_state(run.id, Cancelling() if has_begun else Cancelled())


async def cancel_shards(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the unfinished shards of a cancelled flow run: a hook for runs whose process could not do so."""
    if (flow_run.parameters or {}).get("shards") is not None:
        async with get_client() as client:
            await cancel_runs(client, [flow_run.id])
