"""Slots whose leases the Prefect server has lost: they are given back.

Prefect counts a limit's slots in its database, and keeps the leases elsewhere: by default in memory. A server that
restarts forgets the leases, and nothing frees their slots. So each of our limits has one more lease that takes no slot,
the proof. A Prefect Variable, named after the limit's id, has the proof's id. If the proof is gone, the limit's other
leases are gone too. Then its slots are counted anew, and the runs that live take new slots.
"""

from contextlib import suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, VariableCreate
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

PROOF_SECONDS = 86_400.0  # the longest lease that Prefect grants
PROOF_NAME = "rlm-batch.proof"  # No limit has this name, so a lease of it takes no slot.
VARIABLE_PREFIX = "rlm_batch_proof_"


async def return_lost_slots(client: PrefectClient, name: str) -> GlobalConcurrencyLimitResponse | None:
    """Renew the proof of the limit with that name or id, and create a missing one.

    If the proof is gone, set the slots in use to 0, and return the limit as it was before.

    Raises httpx.HTTPError if the server does not answer.
    """
    # The limit was deleted, another process creates the proof, or the server refuses Variables.
    with suppress(ObjectNotFound, ObjectAlreadyExists, httpx.HTTPStatusError):
        limit = await client.read_global_concurrency_limit_by_name(name)
        variable = VARIABLE_PREFIX + limit.id.hex
        proof = await client.read_variable_by_name(variable)
        if proof is not None:
            if await renew_lease(client, UUID(str(proof.value)), PROOF_SECONDS):
                return None
            await client.update_global_concurrency_limit(limit.name, GlobalConcurrencyLimitUpdate(active_slots=0))
            await client.delete_variable_by_name(variable)
        answer = await client.increment_concurrency_slots_with_lease([PROOF_NAME], 1, "concurrency", PROOF_SECONDS)
        lease = answer.json()["lease_id"]
        await client.create_variable(VariableCreate(name=variable, value=lease, tags=["rlm-batch"]))
        return limit if proof is not None else None
    return None


async def return_all_lost_slots(client: PrefectClient) -> list[GlobalConcurrencyLimitResponse]:
    """Give back the lost slots of all limits that have a proof. Return these limits, as they were before.

    Raises httpx.HTTPError.
    """
    only = {"name": {"like_": f"{VARIABLE_PREFIX}%"}}
    answer = await client.request("POST", "/variables/filter", json={"variables": only, "limit": 200})
    names = [variable["name"].removeprefix(VARIABLE_PREFIX) for variable in answer.json()]
    limits = [await return_lost_slots(client, name) for name in names]
    return [limit for limit in limits if limit is not None and limit.active_slots]


async def renew_lease(client: PrefectClient, lease: UUID, seconds: float) -> bool:
    """Renew a lease; False if the server does not have it. Raises httpx.HTTPError."""
    try:
        await client.renew_concurrency_lease(lease, seconds)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.GONE:
            return False
        raise
    return True
