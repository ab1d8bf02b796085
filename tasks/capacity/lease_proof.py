"""The proof that a Prefect server still has the leases of a limit, and the repair of a limit that has lost them.

Prefect counts a limit's slots in its database, and keeps the leases elsewhere: by default in memory. A server that
restarts forgets the leases, and nothing frees their slots. So each of our limits has one more lease that takes no slot,
the proof. A Prefect Variable, named after the limit's id, has the proof's id. If the proof is gone, the limit's other
leases are gone too. Then the limit is created again without slots in use, and the runs that live take new slots.

The new limit has another id. So a repair that several processes begin at the same time happens once, and a lease of the
old limit never changes the new limit's count.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, VariableCreate
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

PROOF_SECONDS = 86_400.0  # the longest lease that Prefect grants
PROOF_NAME = "rlm-batch.proof"  # No limit has this name, so a lease of it takes no slot.
VARIABLE_PREFIX = "rlm_batch_proof_"


async def repair_limit(client: PrefectClient, limit: GlobalConcurrencyLimitResponse) -> bool:
    """Renew a limit's proof, and create a missing one. If the proof is gone, create the limit again.

    A server that refuses Variables has no proofs, and its limits are never repaired.

    Returns:
        True if the limit's leases were lost, and its slots are counted anew.

    Raises:
        httpx.HTTPError: The server does not answer.
    """
    variable = VARIABLE_PREFIX + limit.id.hex
    try:
        proof = await client.read_variable_by_name(variable)
        if proof is None:
            answer = await client.increment_concurrency_slots_with_lease([PROOF_NAME], 1, "concurrency", PROOF_SECONDS)
            lease = answer.json()["lease_id"]
            with suppress(ObjectAlreadyExists):  # Another process has created it meanwhile.
                await client.create_variable(VariableCreate(name=variable, value=lease, tags=["rlm-batch"]))
            return False
        if await renew_lease(client, UUID(str(proof.value)), PROOF_SECONDS):
            return False
    except (httpx.HTTPStatusError, ValueError):
        return False
    with suppress(ObjectNotFound):  # Another process does the same.
        await client.delete_global_concurrency_limit_by_name(str(limit.id))
    with suppress(ObjectNotFound):
        await client.delete_variable_by_name(variable)
    settings = {name: getattr(limit, name) for name in ("name", "limit", "active", "slot_decay_per_second")}
    with suppress(ObjectAlreadyExists):
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(**settings))
    return True


async def repair_limits(client: PrefectClient) -> AsyncIterator[GlobalConcurrencyLimitResponse]:
    """Repair all limits that have a proof. Yield each limit whose leases were lost, as it was before.

    Raises httpx.HTTPError.
    """
    only = {"name": {"like_": f"{VARIABLE_PREFIX}%"}}
    answer = await client.request("POST", "/variables/filter", json={"variables": only, "limit": 200})
    variables: list[dict[str, Any]] = answer.json()
    for name in (variable["name"] for variable in variables):
        try:
            limit = await client.read_global_concurrency_limit_by_name(name.removeprefix(VARIABLE_PREFIX))
        except ObjectNotFound:  # The limit was deleted.
            with suppress(ObjectNotFound):
                await client.delete_variable_by_name(name)
        else:
            if await repair_limit(client, limit):
                yield limit


def describe_repair(limit: GlobalConcurrencyLimitResponse) -> str:
    """Return a sentence on a limit whose leases were lost. `limit` is the limit as it was before."""
    return (
        f"the Prefect server has lost its leases, probably by a restart: the {limit.active_slots} slots in use of "
        f"{limit.name} are free again, and runs that still hold one take it anew"
    )


async def renew_lease(client: PrefectClient, lease: UUID, seconds: float) -> bool:
    """Renew a lease; False if the server does not have it. Raises httpx.HTTPError."""
    try:
        await client.renew_concurrency_lease(lease, seconds)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.GONE:
            return False
        raise
    return True
