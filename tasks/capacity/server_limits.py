"""A provider's limits: how many sandboxes at one time, and how many new ones a second, over all that share a server.

They are Prefect's global concurrency limits, so that they hold over every flow run and machine of one Prefect server,
and are seen and changed in its UI. Without a server that is shared they hold in this process.
"""

import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID, uuid4

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError
from ..server_errors import describe_server_error

LEASE_SECONDS = 60.0  # seconds after which a holder that has said nothing loses its slot; the least that Prefect grants
MAX_WAITING_RUNS = 10_000  # flow runs that may wait for one limit: it only has to be more than there are


@dataclass(frozen=True, slots=True)
class LimitNames:
    """The names of a provider's limits on the server."""

    sandboxes: str

    @property
    def creations(self) -> str:
        """Of new sandboxes a second: one slot that decays. A larger one would admit a burst."""
        return f"{self.sandboxes}.creations"

    @property
    def waiting(self) -> str:
        """What flow runs hold that wait and have no slot at all: nothing else tells the others of them."""
        return f"{self.sandboxes}.waiting"


def get_limit_names(provider: SandboxProvider) -> LimitNames | None:
    """The names of its limits, None where it is not a saved block and has no name for them."""
    if provider.limit_name is not None:
        return LimitNames(provider.limit_name)
    if not isinstance(provider, Block):
        return None
    saved = provider._block_document_name  # pyright: ignore[reportPrivateUsage] - Prefect's only place
    return None if saved is None else LimitNames(f"rlm-batch.{provider.get_block_type_slug()}.{saved}")


def build_limit_settings(provider: SandboxProvider) -> dict[str, dict[str, Any]]:
    """What the server's limits are to be, by their names."""
    names = get_limit_names(provider)
    if names is None:
        return {}
    settings: dict[str, dict[str, Any]] = {}
    if provider.max_sandboxes is not None:
        settings[names.sandboxes] = {"limit": provider.max_sandboxes}
        settings[names.waiting] = {"limit": MAX_WAITING_RUNS}
    if provider.creations_per_second is not None:
        settings[names.creations] = {"limit": 1, "slot_decay_per_second": provider.creations_per_second}
    return settings


async def reconcile_limits(provider: SandboxProvider) -> None:
    """Makes the server's limits what the block says.

    A limit that the block no longer has is removed, unless its name was given: others may have it too. Does nothing for
    a block that is not saved. Raises httpx.HTTPError where the server does not answer.
    """
    names, limits = get_limit_names(provider), build_limit_settings(provider)
    if names is None:
        return
    async with get_client() as client:
        for name, settings in limits.items():
            try:
                await client.upsert_global_concurrency_limit_by_name(name, **settings)
            except ObjectAlreadyExists:  # made by another at the same moment
                await client.upsert_global_concurrency_limit_by_name(name, **settings)
        if provider.limit_name is None:
            for name in {names.sandboxes, names.creations, names.waiting} - set(limits):
                with suppress(ObjectNotFound):
                    await client.delete_global_concurrency_limit_by_name(name)


class ServerLimits:
    """The limits on the Prefect server of this client, where slots are taken and given back.

    A slot is known by the id of its lease. Every method raises httpx.HTTPError.
    """

    shared: ClassVar[bool] = True  # over every flow run and machine of a server

    def __init__(self, client: PrefectClient, provider: SandboxProvider, run_id: str) -> None:
        self._client, self._provider, self._run_id = client, provider, run_id

    async def acquire_slot(self, name: str) -> UUID | None:
        """A slot, None when all are in use."""
        if await self._is_full(name):
            return None
        holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(self._run_id))
        granted = await self._request(
            self._client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_SECONDS, holder)
        )
        if granted is None or not await self._ensure_exists(granted["limits"]):
            return None
        return UUID(granted["lease_id"])

    async def release_slot(self, lease: UUID) -> None:
        """Where this raises, the slot comes back by itself, when its lease ends."""
        await self._client.release_concurrency_slots_with_lease(lease)

    async def renew_slot(self, lease: UUID) -> bool:
        """Keeps a slot for another while; False when it had ended."""
        try:
            await self._client.renew_concurrency_lease(lease, LEASE_SECONDS)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.GONE:
                return False
            raise
        return True

    async def count_slots_in_use(self, name: str) -> int:
        return (await self._client.read_global_concurrency_limit_by_name(name)).active_slots

    async def acquire_rate_slot(self, name: str) -> bool:
        """Takes a slot that decays by itself; False when there is none now."""
        if await self._is_full(name):
            return False
        granted = await self._request(self._client.increment_concurrency_slots([name], 1, "rate_limit"))
        return granted is not None and await self._ensure_exists(granted)

    async def _is_full(self, name: str) -> bool:
        """Asks before it takes: a refusal is written to the database, and makes a slot that decays begin again."""
        try:
            limit = await self._client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            await reconcile_limits(self._provider)
            return False
        return limit.active and limit.active_slots >= limit.limit

    async def _request(self, request: Awaitable[httpx.Response]) -> Any:
        """What the server grants, None where another was quicker."""
        try:
            return (await request).json()
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.LOCKED:
                raise
            return None

    async def _ensure_exists(self, limits: list[Any]) -> bool:
        """Prefect grants slots of a limit that is not there. Someone has removed it: it is made again."""
        if not limits:
            await reconcile_limits(self._provider)
        return bool(limits)


class ProcessLimits:
    """The same in this process, for every flow run in it."""

    shared: ClassVar[bool] = False
    _lock: ClassVar[threading.Lock] = threading.Lock()  # flow runs may have an event loop each
    _slots: ClassVar[dict[str, set[UUID]]] = {}
    _ticked: ClassVar[dict[str, float]] = {}

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

    async def renew_slot(self, lease: UUID) -> bool:
        return True

    async def count_slots_in_use(self, name: str) -> int:
        return len(self._slots.get(name, ()))

    async def acquire_rate_slot(self, name: str) -> bool:
        now = time.monotonic()
        with self._lock:
            last = self._ticked.get(name)
            if last is not None and now - last < 1 / self._settings[name]["slot_decay_per_second"]:
                return False
            self._ticked[name] = now
            return True


Limits = ServerLimits | ProcessLimits


@asynccontextmanager
async def open_limits(provider: SandboxProvider, run_id: str) -> AsyncIterator[Limits | None]:
    """Where the provider's slots are taken by a flow run; None where it has no limit.

    Makes the server's limits what the block says. Raises ConfigurationError where the server does not let it.
    """
    settings = build_limit_settings(provider)
    if not PREFECT_API_URL.value():
        yield ProcessLimits(settings) if settings else None
        return
    try:
        await reconcile_limits(provider)
    except httpx.HTTPError as error:
        reason = describe_server_error(error)
        raise ConfigurationError(
            f"the limits of the block could not be made on the Prefect server ({reason}): see that it answers, and "
            "that you may change its concurrency limits"
        ) from error
    if not settings:
        yield None
        return
    async with get_client() as client:
        yield ServerLimits(client, provider, run_id)
