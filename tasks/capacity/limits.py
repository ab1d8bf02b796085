"""A provider's limits: the number of sandboxes at one time, and of new sandboxes a second.

They are Prefect's global concurrency limits, so they apply to all flow runs and machines of a Prefect server, and its
UI shows them. Without a configured server they apply to this process only.

Prefect's contexts `concurrency` and `rate_limit` are not used. Their wait logs an error for each refused request, or
keeps a process from ending until a slot is free, and each held slot takes another thread and client.

Prefect counts a limit's slots in its database, and keeps the leases elsewhere: by default in memory. A server that
restarts forgets the leases, and nothing frees their slots. So rlm-batch has one more lease, the proof, which takes no
slot. A Prefect Variable stores its id. If the server no longer has the proof, it has lost the other leases too. Then
rlm-batch sets the counts of its limits to 0, and living runs take new slots.
"""

import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar
from uuid import UUID, uuid4

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, VariableCreate, VariableUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.server_message import describe_server_error

LEASE_SECONDS = 60.0  # A holder that does not renew its lease loses its slot. Prefect grants no shorter lease.
CREATIONS, WAITING = ".creations", ".waiting"  # the ends of the names of a provider's other limits
MAX_WAITING_RUNS = 10_000  # flow runs that may wait for one limit; too many to matter
PROOF_SECONDS = 86_400.0  # the longest lease that Prefect grants
PROOF_NAME = "rlm-batch.proof"  # No limit has this name, so a lease of it takes no slot.
VARIABLE_NAME = "rlm_batch_server"


def get_limit_name(provider: SandboxProvider) -> str | None:
    """Return the name of a provider's limit on sandboxes; None for an unsaved block without a `limit_name`."""
    if provider.limit_name is not None or not isinstance(provider, Block):
        return provider.limit_name
    block_name = provider._block_document_name  # pyright: ignore[reportPrivateUsage] - Prefect has no public one
    return None if block_name is None else f"rlm-batch.{provider.provider_name}-sandbox.{block_name}"


def build_limit_settings(provider: SandboxProvider) -> dict[str, dict[str, Any]]:
    """Return the settings of a provider's limits on the server, by name."""
    name = get_limit_name(provider)
    if name is None:
        return {}
    settings: dict[str, dict[str, Any]] = {}
    if provider.max_sandboxes is not None:
        settings[name] = {"limit": provider.max_sandboxes}
        settings[name + WAITING] = {"limit": MAX_WAITING_RUNS}
    if provider.creations_per_second is not None:  # More slots would allow bursts.
        settings[name + CREATIONS] = {"limit": 1, "slot_decay_per_second": provider.creations_per_second}
    return settings


class ServerLimits:
    """The limits on a Prefect server. Every method raises httpx.HTTPError if the server does not answer."""

    poll_factor: ClassVar[float] = 1.0

    def __init__(self, client: PrefectClient, run_id: str) -> None:
        self._client = client
        self._holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(run_id))

    async def set_up(self, settings: dict[str, dict[str, Any]]) -> None:
        """Set the limits to the block's values, and free the slots whose leases the server has lost."""
        for name, values in settings.items():
            try:
                await self._client.upsert_global_concurrency_limit_by_name(name, **values)
            except (ObjectAlreadyExists, ObjectNotFound):  # Another process created or repaired it at the same time.
                await self._client.upsert_global_concurrency_limit_by_name(name, **values)
        await return_lost_slots(self._client)

    async def acquire_slot(self, name: str) -> UUID | None:
        """Return the lease of a new slot; None if all slots are in use."""
        increment = self._client.increment_concurrency_slots_with_lease
        answer = await self._request(increment([name], 1, "concurrency", LEASE_SECONDS, self._holder))
        return None if answer is None else UUID(answer.json()["lease_id"])

    async def release_slot(self, lease: UUID) -> None:
        """Return a slot to the server. If this raises, the slot becomes free when its lease ends."""
        await self._client.release_concurrency_slots_with_lease(lease)

    async def renew_slot(self, name: str, lease: UUID | None) -> UUID | None:
        """Renew a slot's lease, and return it. If it has ended, return that of another slot; None if all are in use."""
        if lease is not None:
            if await _renew_lease(self._client, lease, LEASE_SECONDS):
                return lease
            await return_lost_slots(self._client)
        return await self.acquire_slot(name)

    async def count_slots_in_use(self, name: str) -> int:
        """Return the number of slots in use."""
        try:
            return (await self._client.read_global_concurrency_limit_by_name(name)).active_slots
        except ObjectNotFound:  # It was deleted, or another process is creating it again.
            return 0

    async def acquire_rate_slot(self, name: str) -> bool:
        """Take a slot that becomes free by itself after some time. Return False if none is free."""
        if await self.count_slots_in_use(name):  # A refused request would restart the time.
            return False
        return await self._request(self._client.increment_concurrency_slots([name], 1, "rate_limit")) is not None

    async def _request(self, request: Awaitable[httpx.Response]) -> httpx.Response | None:
        """Return the answer to a request of a slot; None if no slot is free."""
        try:
            return await request
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.LOCKED:
                raise
            return None


class ProcessLimits:
    """Limits of this process, with the methods of `ServerLimits`, for runs with an embedded server.

    Such a server does not run Prefect's service that ends leases, so the slots of a killed program would stay taken.
    """

    poll_factor: ClassVar[float] = 0.05  # Runs poll them more often, because a request costs nothing.
    _lock: ClassVar[threading.Lock] = threading.Lock()  # Flow runs may have different event loops.
    _slots: ClassVar[dict[str, set[UUID]]] = {}  # the leases by the limit's name
    _granted_at: ClassVar[dict[str, float]] = {}  # the time of the last rate slot by the limit's name

    def __init__(self, settings: dict[str, dict[str, Any]]) -> None:
        self._settings = settings

    async def acquire_slot(self, name: str) -> UUID | None:
        with self._lock:
            slots = self._slots.setdefault(name, set())
            if len(slots) >= self._settings[name]["limit"]:
                return None
            lease = uuid4()
            slots.add(lease)
            return lease

    async def release_slot(self, lease: UUID) -> None:
        with self._lock:
            for slots in self._slots.values():
                slots.discard(lease)

    async def renew_slot(self, name: str, lease: UUID | None) -> UUID | None:
        return lease

    async def count_slots_in_use(self, name: str) -> int:
        return len(self._slots.get(name, ()))

    async def acquire_rate_slot(self, name: str) -> bool:
        now = time.monotonic()
        with self._lock:
            if now - self._granted_at.get(name, 0.0) < 1 / self._settings[name]["slot_decay_per_second"]:
                return False
            self._granted_at[name] = now
            return True


Limits = ServerLimits | ProcessLimits


@asynccontextmanager
async def open_limits(provider: SandboxProvider, run_id: str) -> AsyncIterator[Limits | None]:
    """Set the server's limits to the block's values, and yield them; None for a provider without limits.

    Raises ConfigurationError if the server refuses.
    """
    settings = build_limit_settings(provider)
    if not settings:
        yield None
        return
    if not PREFECT_API_URL.value():
        yield ProcessLimits(settings)
        return
    async with get_client() as client:
        limits = ServerLimits(client, run_id)
        try:
            await limits.set_up(settings)
        except httpx.HTTPError as error:
            reason = describe_server_error(error)
            raise ConfigurationError(
                f"the block's concurrency limits could not be created on the Prefect server ({reason})"
            ) from error
        yield limits


async def read_server_variable(client: PrefectClient) -> dict[str, Any]:
    """Return the value of our Variable: the server's `id`, and the id of the `proof` if there is one.

    A missing Variable is created. Raises httpx.HTTPError if the server does not answer or refuses Variables.
    """
    variable = await client.read_variable_by_name(VARIABLE_NAME)
    if variable is None:
        variable = VariableCreate(name=VARIABLE_NAME, value={"id": uuid4().hex}, tags=["rlm-batch"])
        try:
            await client.create_variable(variable)
        except ObjectAlreadyExists:  # Another process has created it meanwhile.
            return await read_server_variable(client)
    value = variable.value
    return value if isinstance(value, dict) else {"id": str(value)}  # Version 1.0 wrote only the id.


async def return_lost_slots(client: PrefectClient) -> list[GlobalConcurrencyLimitResponse]:
    """Free the slots of our limits if the server has lost the proof, and renew or create the proof.

    Returns the limits with freed slots, as they were before. Raises httpx.HTTPError if the server does not answer.
    """
    freed: list[GlobalConcurrencyLimitResponse] = []
    # The server refuses Variables, or a limit was deleted meanwhile.
    with suppress(httpx.HTTPStatusError, ObjectNotFound):
        value = await read_server_variable(client)
        if "proof" in value:
            if await _renew_lease(client, UUID(value["proof"]), PROOF_SECONDS):
                return []
            for limit in await _list_own_limits(client):
                await client.update_global_concurrency_limit(limit.name, GlobalConcurrencyLimitUpdate(active_slots=0))
                freed.append(limit)
        answer = await client.increment_concurrency_slots_with_lease([PROOF_NAME], 1, "concurrency", PROOF_SECONDS)
        value = {**value, "proof": answer.json()["lease_id"]}
        await client.update_variable(VariableUpdate(name=VARIABLE_NAME, value=value))
    return [limit for limit in freed if limit.active_slots]


async def _list_own_limits(client: PrefectClient) -> list[GlobalConcurrencyLimitResponse]:
    """Return the server's limits on sandboxes and on waiting runs. Each of the former has one of the latter."""
    limits = await client.read_global_concurrency_limits(limit=200)  # the most that a server returns
    names = {limit.name for limit in limits}
    own_names = {name for name in names if name + WAITING in names}
    return [limit for limit in limits if limit.name.removesuffix(WAITING) in own_names]


async def _renew_lease(client: PrefectClient, lease: UUID, seconds: float) -> bool:
    """Renew a lease. Return False if the server does not have it."""
    try:
        await client.renew_concurrency_lease(lease, seconds)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.GONE:
            return False
        raise
    return True
