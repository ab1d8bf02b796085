"""Slots of concurrency limits that no living run holds: `reap` gives them back.

A slot is lost if its holder dies, or ends, after the Prefect server has lost its leases. By default Prefect keeps them
in memory, so a restart loses them. The limits of provider blocks have a proof of their leases
(`tasks/capacity/lost_leases.py`). A deployment's limit needs none: each slot belongs to a run that is Pending, Running
or Cancelling.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse

from ..tasks.capacity.lost_leases import return_all_lost_slots
from .orphans import MIN_SILENCE_SECONDS, PAGE_SIZE, measure_silence

ENTRYPOINT_PREFIX = "rlm_batch."  # the entrypoints of deployments of our flows
LOOK_AGAIN_SECONDS = 3.0  # A run that starts or ends between two requests changes only one of two looks.
HOLDING = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


async def return_lost_slots(*, dry_run: bool = False) -> list[str]:
    """Give back the slots of our limits and deployments that no living run holds.

    A run of a deployment counts as dead after `MIN_SILENCE_SECONDS` without an event.

    Args:
        dry_run: Change nothing. Lost slots of blocks are then not listed.

    Returns:
        A sentence for each limit.

    Raises:
        httpx.HTTPError: The server does not answer or refuses.
    """
    sentences: list[str] = []
    async with get_client() as client:
        if not dry_run:
            sentences += [
                f"the Prefect server has lost its leases, probably by a restart: the {limit.active_slots} slots in use "
                f"of {limit.name} are free again, and runs that still hold one take it anew"
                async for limit in return_all_lost_slots(client)
            ]
        first = {found.id: lost async for found, lost in _find_lost_slots(client)}
        if not first:
            return sentences
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        async for deployment, lost in _find_lost_slots(client):
            count = min(lost, first.get(deployment.id, 0))
            limit = deployment.global_concurrency_limit
            if count and limit is not None:
                if not dry_run:
                    body = {"names": [limit.name], "slots": count}
                    await client.request("POST", "/v2/concurrency_limits/decrement", json=body)
                verb = "would be given" if dry_run else "were given"
                sentences.append(
                    f"{count} of {limit.limit} slots of the deployment {deployment.name} {verb} back: no run held them"
                )
    return sentences


async def _find_lost_slots(client: PrefectClient) -> AsyncIterator[tuple[DeploymentResponse, int]]:
    """Yield our deployments with more slots in use than living runs, and the difference."""
    offset = 0
    while page := await client.read_deployments(limit=PAGE_SIZE, offset=offset):
        offset += len(page)
        for deployment in page:
            is_ours = (deployment.entrypoint or "").startswith(ENTRYPOINT_PREFIX)
            if not is_ours or deployment.global_concurrency_limit is None:
                continue
            before = await _list_living_runs(client, deployment)
            limit = await client.read_global_concurrency_limit_by_name(deployment.global_concurrency_limit.name)
            lost = limit.active_slots - len(before | await _list_living_runs(client, deployment))
            if lost > 0:
                yield deployment, lost


async def _list_living_runs(client: PrefectClient, deployment: DeploymentResponse) -> set[uuid.UUID]:
    """Return the runs of a deployment that hold a slot and have shown signs of life."""
    runs = await client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(HOLDING)))),
        limit=PAGE_SIZE,
    )
    now = time.time()
    return {run.id for run in runs if await measure_silence(client, run, [], now) <= MIN_SILENCE_SECONDS}
