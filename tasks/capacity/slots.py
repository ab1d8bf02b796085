"""A flow run's slots of its provider's limit. Lanes hold slots for many executions, and hand them over to other runs.

Prefect's server sends no notice when a slot is released, or when other runs wait. So a run polls the server, and more
often while it has no slot. A run without a sandbox slot takes a slot of a second limit, `waiting`. Runs with slots
look at that limit to see whether they should hand over a slot.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import httpx

from ...blocks.provider import SandboxProvider
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import RlmBatchError
from ...sandbox.outcomes.server_message import describe_server_error
from .admission import Admission, Log
from .limits import CREATIONS, WAITING, Limits, ProcessLimits, get_limit_name, open_limits

T = TypeVar("T")

POLL_SECONDS = 1.0  # seconds between requests of a run without slots
POLL_FOR_MORE_SECONDS = 3.0  # seconds between requests of a run that has slots, or has just handed one over
WAITING_CHECK_SECONDS = 2.0  # seconds between checks for other runs that wait
MIN_HOLD_SECONDS = 30.0  # the least time before a slot is handed over; its lane then pays for a new sandbox
RENEW_SECONDS = 15.0  # seconds between renewals of a lease; the server may fail to answer for 45 s


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of a limit."""

    name: str  # the limit's name
    lease: UUID | None  # None if the lease has ended, until the run gets another slot of the limit
    granted_at: float  # seconds of the event loop's clock


class Slots:
    """The slots of one flow run, which its lanes share. Without `limits` each lane gets its slot at once.

    With `limits`, a task must run `renew_leases` as long as the run holds slots.
    """

    def __init__(self, provider: SandboxProvider, admission: Admission, log: Log, limits: Limits | None = None) -> None:
        self.admission = admission
        self._log = log
        self._limits = limits or ProcessLimits({})
        self._name = get_limit_name(provider) or ""
        self._max_sandboxes = provider.max_sandboxes if limits else None
        self._creations_per_second = provider.creations_per_second if limits else None
        self._request_lock = asyncio.Lock()  # The lane that has waited longest holds it, and makes the requests.
        self._dismissal = asyncio.Event()  # dismisses the lanes that wait now
        self._held: set[Slot] = set()  # the lanes' slots
        self._waiting: Slot | None = None  # a slot of the limit `waiting`, while this run has no other slot
        self._next_request_at = 0.0  # the earliest time of the next request of a slot
        self._next_check_at = 0.0  # the earliest time of the next check for other runs that wait
        self._creation_lock = asyncio.Lock()  # held by the lane that waits for its creation
        self._is_server_away = False  # True if the last request had no answer

    async def acquire(self) -> Slot | None:
        """Wait for a slot; None after `dismiss_waiters`."""
        if self._max_sandboxes is None:
            return Slot("", None, 0.0)
        dismissal = self._dismissal
        async with self._request_lock:
            try:
                return await self._poll_for_slot(dismissal)
            finally:
                if self._waiting is not None:
                    await run_shielded(self._end_lease(self._waiting))
                    self._waiting = None

    async def acquire_now(self) -> Slot | None:
        """Return a slot if one is free and no lane of this run waits for it, else None."""
        if self._max_sandboxes is None:
            return Slot("", None, 0.0)
        return None if self._request_lock.locked() else await self._take_slot()

    async def release(self, slot: Slot) -> None:
        """Give back a slot whose sandbox was removed."""
        if slot in self._held:
            self._held.remove(slot)
            await run_shielded(self._end_lease(slot))

    async def should_hand_over(self, slot: Slot) -> bool:
        """Return whether the lane should give the slot back before its next execution, because other runs wait."""
        now = _read_clock()
        was_held_long_enough = slot in self._held and now - slot.granted_at >= MIN_HOLD_SECONDS
        if not was_held_long_enough or now < self._next_check_at:
            return False
        self._next_check_at = now + WAITING_CHECK_SECONDS  # Lanes hand slots over one at a time.
        if not await self._ask_server(self._limits.count_slots_in_use(self._name + WAITING), 0):
            return False
        self._next_request_at = now + self._limits.poll_factor * POLL_FOR_MORE_SECONDS
        return True

    def dismiss_waiters(self) -> None:
        """Let all calls that wait for a slot or a permit return None, because there is no more work."""
        self.admission.dismiss_waiters()
        self._dismissal.set()
        self._dismissal = asyncio.Event()

    def end(self, error: RlmBatchError) -> None:
        """Let no more sandboxes open, because of an error. Open sandboxes stay open."""
        self.admission.end(error)
        self.dismiss_waiters()

    async def wait_for_creation(self) -> None:
        """Wait until a sandbox may be created."""
        if self._creations_per_second is None:
            return
        async with self._creation_lock:  # one request at a time
            while not await self._ask_server(self._limits.acquire_rate_slot(self._name + CREATIONS), False):
                interval = random.uniform(0.2, 0.6) / self._creations_per_second
                await asyncio.sleep(POLL_SECONDS if self._is_server_away else interval)

    async def close(self) -> None:
        """Give all slots back."""
        self.dismiss_waiters()
        await asyncio.gather(*(self.release(slot) for slot in self._held))

    async def _poll_for_slot(self, dismissal: asyncio.Event) -> Slot | None:
        """Request a slot again and again until one is granted. Return None if the lane is dismissed."""
        while not dismissal.is_set():
            pause = self._next_request_at - _read_clock()
            if pause <= 0:
                slot = await self._take_slot()
                if slot is not None and dismissal.is_set():
                    await self.release(slot)
                    return None
                if slot is not None:
                    return slot
                if not self._held and self._waiting is None:
                    await self._show_that_this_run_waits()
                interval = POLL_FOR_MORE_SECONDS if self._held else POLL_SECONDS
                pause = self._limits.poll_factor * interval * random.uniform(0.75, 1.25)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await dismissal.wait()
        return None

    async def _show_that_this_run_waits(self) -> None:
        """Take a slot of the limit `waiting`, by which other runs see that this run waits."""
        self._waiting = await self._request_slot(self._name + WAITING)
        if self._waiting is not None:
            self._log.info("waiting for one of the %s slots of %s", self._max_sandboxes, self._name)

    async def _take_slot(self) -> Slot | None:
        """Take a slot for a lane; None if all are in use. `close` gives it back if the lane is cancelled meanwhile."""
        request = asyncio.ensure_future(self._request_held_slot())
        await run_shielded(request)
        return request.result()

    async def _request_held_slot(self) -> Slot | None:
        slot = await self._request_slot(self._name)
        if slot is not None:
            self._held.add(slot)
        return slot

    async def _request_slot(self, name: str) -> Slot | None:
        lease = await self._ask_server(self._limits.acquire_slot(name), None)
        return None if lease is None else Slot(name, lease, _read_clock())

    async def renew_leases(self) -> None:
        """Renew the leases of the slots until cancelled. Request another slot for each lease that has ended."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            slots = list(self._held)
            if self._waiting is not None:
                slots.append(self._waiting)
            for slot in slots:
                slot.lease = await self._ask_server(self._limits.renew_slot(slot.name, slot.lease), slot.lease)
                if slot is not self._waiting and slot not in self._held:  # The lane has given it back meanwhile.
                    await self._end_lease(slot)

    async def _end_lease(self, slot: Slot) -> None:
        if slot.lease is not None:
            await self._ask_server(self._limits.release_slot(slot.lease), None)

    async def _ask_server(self, request: Awaitable[T], default: T) -> T:
        """Return the server's answer, or `default` if the server does not answer."""
        try:
            answer = await request
        except httpx.HTTPError as error:
            if not self._is_server_away:  # Log only the first failure in a row.
                text = "the Prefect server did not answer about the limit %s: %s"
                self._log.warning(text, self._name, describe_server_error(error))
            self._is_server_away = True
            return default
        self._is_server_away = False
        return answer


def _read_clock() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def open_slots(provider: SandboxProvider, run_id: str, log: Log) -> AsyncIterator[Slots]:
    """Yield the slots of a flow run, and give them back at the end.

    Raises ConfigurationError if the server refuses the provider's limits.
    """
    admission = Admission(log, is_gradual=provider.gradual)
    async with open_limits(provider, run_id) as limits:
        slots = Slots(provider, admission, log, limits)
        if limits is None:
            yield slots
            return
        task = asyncio.create_task(slots.renew_leases())
        try:
            yield slots
        finally:
            task.cancel()
            await asyncio.wait([task])
            await run_shielded(slots.close())
