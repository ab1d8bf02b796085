"""A provider's limits: the number of sandboxes at one time, and of new sandboxes a second.

They are Prefect's global concurrency limits, so they apply to all flow runs and machines of a Prefect server, and its
UI can show and change them. Without a configured server they apply to this process only.
"""

import asyncio
import math
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
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.variables import Variable

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.server_message import describe_server_error
from .admission import Log
from .lease_proof import describe_repair, renew_lease, repair_limit

LEASE_SECONDS = 60.0  # A holder that does not renew its lease loses its slot. Prefect grants no shorter lease.
CHECK_SECONDS = 15.0  # seconds between two checks that the server still has a limit's leases
RECENT_SECONDS = 1.0  # seconds for which a check counts after a lease has ended
MAX_WAITING_RUNS = 10_000  # flow runs that may wait for one limit; too many to matter
LIMITS_VARIABLE = "rlm_batch_limits"  # a Prefect Variable: the value that rlm-batch last gave to each limit


@dataclass(frozen=True, slots=True)
class LimitNames:
    """The names of a provider's limits on the server."""

    sandboxes: str

    @property
    def creations(self) -> str:
        """Return the limit's name for new sandboxes per second. It has one slot, because more would allow bursts."""
        return f"{self.sandboxes}.creations"

    @property
    def waiting(self) -> str:
        """Return the limit's name for waiting flow runs. A run without a sandbox slot holds a slot of this limit."""
        return f"{self.sandboxes}.waiting"


def get_limit_names(provider: SandboxProvider) -> LimitNames | None:
    """Return the names of a provider's limits; None for an unsaved block without a `limit_name`."""
    if provider.limit_name is not None:
        return LimitNames(provider.limit_name)
    if not isinstance(provider, Block):
        return None
    saved = provider._block_document_name  # pyright: ignore[reportPrivateUsage] - Prefect's only place
    return None if saved is None else LimitNames(f"rlm-batch.{provider.get_block_type_slug()}.{saved}")


def build_limit_settings(provider: SandboxProvider) -> dict[str, dict[str, Any]]:
    """Return the settings of a provider's limits on the server, by name."""
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


async def reconcile_limits(provider: SandboxProvider) -> list[str]:
    """Set the server's limits to the block's values, except where a person has set a lower one.

    A limit that differs from the value that rlm-batch last set was set by a person. Remove limits that the block no
    longer has, unless it has a `limit_name`, because other blocks may share that name. Do nothing for an unsaved block
    without a `limit_name`.

    Returns:
        Sentences about limits that a person has set to other values.

    Raises:
        httpx.HTTPError: The server does not answer or refuses.
    """
    names, limits = get_limit_names(provider), build_limit_settings(provider)
    if names is None:
        return []
    notes: list[str] = []
    async with get_client() as client:
        for name, settings in limits.items():
            try:
                note = await _reconcile_limit(client, name, settings)
            except (ObjectAlreadyExists, ObjectNotFound):  # Another process created or repaired it at the same time.
                note = await _reconcile_limit(client, name, settings)
            notes += [note] if note else []
        if provider.limit_name is None:
            for name in {names.sandboxes, names.creations, names.waiting} - set(limits):
                with suppress(ObjectNotFound):
                    await client.delete_global_concurrency_limit_by_name(name)
    return notes


async def _reconcile_limit(client: PrefectClient, name: str, settings: dict[str, Any]) -> str:
    """Create or change one limit. Return a sentence if a person has set it to another value, or an empty text."""
    setting = "slot_decay_per_second" if "slot_decay_per_second" in settings else "limit"
    wanted = settings[setting]
    try:
        current = getattr(await client.read_global_concurrency_limit_by_name(name), setting)
    except ObjectNotFound:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, **settings))
        await _remember_value(name, wanted)
        return ""
    if current == wanted:
        return ""
    is_own = (await _read_own_values()).get(name) == current
    if current < wanted and not is_own:
        option = setting.replace("_", "-")
        return (
            f"the limit {name} is {current:g} on the Prefect server, less than the block's {wanted:g}, and {current:g} "
            f"holds: `prefect gcl update {name} --{option} {wanted:g}` raises it"
        )
    await client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(**settings))
    await _remember_value(name, wanted)
    if is_own:
        return ""
    return f"the limit {name} was {current:g} on the Prefect server, and is {wanted:g} again, as in the block"


async def _read_own_values() -> dict[str, Any]:
    """Return the value that rlm-batch last gave to each limit; empty if the server refuses variables."""
    with suppress(httpx.HTTPStatusError):
        values = await Variable.aget(LIMITS_VARIABLE)
        return values if isinstance(values, dict) else {}
    return {}


async def _remember_value(name: str, value: float) -> None:
    """Record on the server that rlm-batch set a limit to this value. Then a later change of the block may raise it."""
    with suppress(httpx.HTTPStatusError, ObjectAlreadyExists):
        await Variable.aset(LIMITS_VARIABLE, {**await _read_own_values(), name: value}, overwrite=True)


class ServerLimits:
    """The limits on a Prefect server. The id of a slot is its lease's id. Every method raises httpx.HTTPError."""

    shared: ClassVar[bool] = True  # All flow runs of the server share them.

    def __init__(self, client: PrefectClient, provider: SandboxProvider, run_id: str, log: Log) -> None:
        self._client, self._provider, self._run_id, self._log = client, provider, run_id, log
        self._limits_of_leases: dict[UUID, tuple[str, UUID]] = {}  # the name and the id of each held lease's limit
        self._checks: dict[str, tuple[UUID | None, float]] = {}  # the limit's id, and the time of the last check
        self._check_lock = asyncio.Lock()

    async def acquire_slot(self, name: str) -> UUID | None:
        """Take a slot; None if all are in use."""
        if await self._is_full(name):
            await self.check_leases(name, CHECK_SECONDS)  # The next request finds a repaired limit.
            return None
        holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(self._run_id))
        granted = await self._request(
            self._client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_SECONDS, holder)
        )
        if granted is None or not await self._ensure_exists(granted["limits"]):
            return None
        lease = UUID(granted["lease_id"])
        self._limits_of_leases[lease] = name, UUID(granted["limits"][0]["id"])
        return lease

    async def release_slot(self, lease: UUID) -> None:
        """Return a slot to the server. If this raises, the slot becomes free when its lease ends."""
        self._limits_of_leases.pop(lease, None)
        await self._client.release_concurrency_slots_with_lease(lease)

    async def renew_slot(self, lease: UUID) -> bool:
        """Renew a slot's lease; False if it had ended, or if its limit was created again."""
        if lease not in self._limits_of_leases:  # It has been released meanwhile.
            return True
        name, limit_id = self._limits_of_leases[lease]
        is_renewed = await renew_lease(self._client, lease, LEASE_SECONDS)
        current_id = await self.check_leases(name, CHECK_SECONDS if is_renewed else RECENT_SECONDS)
        if is_renewed and current_id in (limit_id, None):
            return True
        self._limits_of_leases.pop(lease, None)
        return False

    async def check_leases(self, name: str, max_age: float) -> UUID | None:
        """Check that the server still has the limit's leases, and repair the limit if not.

        Args:
            name: The limit's name.
            max_age: Seconds for which an earlier check counts.

        Returns:
            The limit's id; None if it is not known.
        """
        async with self._check_lock:
            limit_id, checked_at = self._checks.get(name, (None, -math.inf))
            if time.monotonic() - checked_at < max_age:
                return limit_id
            try:
                limit = await self._client.read_global_concurrency_limit_by_name(name)
                if await repair_limit(self._client, limit):
                    if limit.active_slots:
                        self._log.warning("%s", describe_repair(limit))
                    limit = await self._client.read_global_concurrency_limit_by_name(name)
            except ObjectNotFound:
                return None
            self._checks[name] = limit.id, time.monotonic()
            return limit.id

    async def count_slots_in_use(self, name: str) -> int:
        try:
            count = (await self._client.read_global_concurrency_limit_by_name(name)).active_slots
        except ObjectNotFound:  # It was deleted, or a repair is creating it again.
            return 0
        if count:
            await self.check_leases(name, CHECK_SECONDS)  # The next request does not count slots without leases.
        return count

    async def acquire_rate_slot(self, name: str) -> bool:
        """Take a slot that decays; False if none is free."""
        if await self._is_full(name):
            return False
        granted = await self._request(self._client.increment_concurrency_slots([name], 1, "rate_limit"))
        return granted is not None and await self._ensure_exists(granted)

    async def _is_full(self, name: str) -> bool:
        """Return whether all slots are in use. A refused request costs a write, and restarts a slot's decay."""
        try:
            limit = await self._client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            await reconcile_limits(self._provider)
            return False
        return limit.active and limit.active_slots >= limit.limit

    async def _request(self, request: Awaitable[httpx.Response]) -> Any:
        """Return the server's answer; None if another process took the slot first."""
        try:
            return (await request).json()
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.LOCKED:
                raise
            return None

    async def _ensure_exists(self, limits: list[Any]) -> bool:
        """Create the limits again if they are missing: then Prefect grants any slot. Return whether they existed."""
        if not limits:
            await reconcile_limits(self._provider)
        return bool(limits)


class ProcessLimits:
    """Limits of this process, with the methods of `ServerLimits`."""

    shared: ClassVar[bool] = False
    _lock: ClassVar[threading.Lock] = threading.Lock()  # Flow runs may have different event loops.
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
async def open_limits(provider: SandboxProvider, run_id: str, log: Log) -> AsyncIterator[Limits | None]:
    """Set the server's limits to the block's values, and yield them; None for a provider without limits.

    The log says which limits a person had set to other values. Raises ConfigurationError if the server refuses.
    """
    settings = build_limit_settings(provider)
    if not PREFECT_API_URL.value():
        yield ProcessLimits(settings) if settings else None
        return
    try:
        for note in await reconcile_limits(provider):
            log.warning("%s", note)
    except httpx.HTTPError as error:
        reason = describe_server_error(error)
        raise ConfigurationError(
            f"the block's concurrency limits could not be created on the Prefect server ({reason}): check "
            "that it answers and that you may change them"
        ) from error
    if not settings:
        yield None
        return
    async with get_client() as client:
        limits = ServerLimits(client, provider, run_id, log)
        for name in (name for name in settings if "slot_decay_per_second" not in settings[name]):
            with suppress(httpx.HTTPError):
                await limits.check_leases(name, 0.0)
        yield limits
