"""A flow run's slots of its provider's limit: its lanes hold them for many executions, and give them to other runs.

Prefect's server notifies nobody of a released slot, nor a holder of others that wait. So a run polls, more often while
it has no slot at all; and while it has none it holds a slot of another limit (`waiting`), by which runs that have slots
see that they should hand one over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import UUID

import httpx

from ...blocks.limits import LEASE_SECONDS, LimitNames, Limits, get_limit_names, open_limits
from ...blocks.provider import SandboxProvider
from ...sandbox.cancellation import run_shielded
from .admission import Admission

T = TypeVar("T")
Log = logging.Logger | logging.LoggerAdapter[Any]

POLL_SECONDS = 1.0  # between two requests of a run that has no slot
POLL_FOR_MORE_SECONDS = 3.0  # of a run that has some, and after one was handed over: the others come first
LOCAL_POLL_SECONDS = 0.05  # of a run whose limit is held in this process, where a request costs nothing
LOCAL_POLL_FOR_MORE_SECONDS = 0.15
WAITING_CHECK_SECONDS = 2.0  # between two checks whether other runs wait
MIN_HOLD_OF_SEVERAL_SECONDS = 10.0  # before a slot is handed over, by a run that has others
MIN_HOLD_SECONDS = 60.0  # by a run that has no other: it pays for a new sandbox, and waits itself
RENEW_SECONDS = 15.0  # between two renewals of a lease of 60 s: a server may be away for 45
LOG_INTERVAL_SECONDS = 60.0  # between two lines of the log that say what is waited for


class Slot:
    """The right to have one sandbox."""

    def __init__(self, lease: UUID, granted_at: float) -> None:
        self.lease = lease
        self.granted_at = granted_at
        self.is_lost = False


class Slots:
    """The slots of one flow run, which its lanes share. Without a limit each has its slot at once.

    Whoever has a slot waits for a permit of `admission` before it opens a sandbox.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = Admission() if admission is None else admission

    async def acquire(self) -> Slot | None:
        """Waits for a slot; None once `dismiss_waiters` was called."""
        return Slot(UUID(int=0), 0.0)

    async def release(self, slot: Slot) -> None:
        """Gives the slot back, whose sandbox was removed."""

    async def should_hand_over(self, slot: Slot) -> bool:
        """Whether to give the slot back between two executions, for other runs that wait."""
        return False

    def dismiss_waiters(self) -> None:
        """Gives None to all that wait for a slot or a permit, as there is no more work."""
        self.admission.dismiss_waiters()

    async def wait_for_creation(self) -> None:
        """Waits until a sandbox may be created."""


class LimitedSlots(Slots):
    """The slots of a provider with limits. `run` has to run for as long as they are used."""

    def __init__(
        self, limits: Limits, names: LimitNames, provider: SandboxProvider, log: Log, admission: Admission | None = None
    ) -> None:
        super().__init__(admission)
        self._limits = limits
        self._names = names
        self._max_sandboxes = provider.max_sandboxes
        self._creations_per_second = provider.creations_per_second
        self._log = log
        self._waiters: deque[asyncio.Future[Slot | None]] = deque()
        self._has_waiters = asyncio.Event()
        self._held: set[Slot] = set()
        self._waiting_lease: UUID | None = None  # of `waiting`, held while this run waits and has no slot
        self._next_request_at = 0.0
        self._next_check_at = 0.0
        self._next_log_at = 0.0
        self._creation_lock = asyncio.Lock()
        self._is_server_away = False  # it did not answer the last request
        self._error: BaseException | None = None
        self._poll_seconds, self._poll_for_more_seconds = (
            (POLL_SECONDS, POLL_FOR_MORE_SECONDS)
            if limits.shared
            else (LOCAL_POLL_SECONDS, LOCAL_POLL_FOR_MORE_SECONDS)
        )

    async def run(self) -> None:
        """Requests slots for those that wait, and renews those that are held, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._request_slots())
                group.create_task(self._renew_leases())
        except BaseExceptionGroup as errors:
            self._error = errors.exceptions[0]
            while self._waiters:
                self._waiters.popleft().set_exception(self._error)

    async def acquire(self) -> Slot | None:
        if self._max_sandboxes is None:
            return await super().acquire()
        if self._error is not None:
            raise self._error
        waiter: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._has_waiters.set()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (slot := waiter.result()) is not None:
                await self.release(slot)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def release(self, slot: Slot) -> None:
        if slot in self._held:
            self._held.remove(slot)
            await run_shielded(self._end_lease(slot.lease))

    async def should_hand_over(self, slot: Slot) -> bool:
        if slot.is_lost:
            return True
        now = _read_clock()
        min_hold = MIN_HOLD_OF_SEVERAL_SECONDS if len(self._held) > 1 else MIN_HOLD_SECONDS
        if slot not in self._held or now - slot.granted_at < min_hold or now < self._next_check_at:
            return False
        self._next_check_at = now + WAITING_CHECK_SECONDS  # for one lane at a time
        if not await self._ask_server(self._limits.count_slots_in_use(self._names.waiting), 0):
            return False
        self._next_request_at = now + self._poll_for_more_seconds
        return True

    def dismiss_waiters(self) -> None:
        super().dismiss_waiters()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_creation(self) -> None:
        if self._creations_per_second is None:
            return
        async with self._creation_lock:  # one request at a time
            while True:
                if await self._ask_server(self._limits.acquire_rate_slot(self._names.creations), False):
                    return
                interval = random.uniform(0.2, 0.6) / self._creations_per_second
                await asyncio.sleep(POLL_SECONDS if self._is_server_away else interval)

    async def close(self) -> None:
        """Gives all slots back."""
        self.dismiss_waiters()
        leases = [slot.lease for slot in self._held]
        if self._waiting_lease is not None:
            leases.append(self._waiting_lease)
        self._held.clear()
        self._waiting_lease = None
        await asyncio.gather(*(self._end_lease(lease) for lease in leases))

    async def _request_slots(self) -> None:
        while True:
            await self._has_waiters.wait()
            if self._waiters:
                await self._request_slot()
            if not self._waiters:
                self._has_waiters.clear()
                await self._end_waiting()

    async def _request_slot(self) -> None:
        """Makes one request, for the first that waits, and pauses where there is no slot."""
        now = _read_clock()
        if now < self._next_request_at:
            await asyncio.sleep(self._next_request_at - now)
        lease = await self._acquire_lease(self._names.sandboxes)
        if lease is not None:
            await self._hand_out(Slot(lease, _read_clock()))
            return
        self._log_waiting()
        if not self._held and self._waiting_lease is None:
            self._waiting_lease = await self._acquire_lease(self._names.waiting)
        interval = self._poll_for_more_seconds if self._held else self._poll_seconds
        await asyncio.sleep(interval * random.uniform(0.75, 1.25))

    async def _acquire_lease(self, name: str) -> UUID | None:
        """A lease of the limit, None where there is none now. One that comes during a cancellation is given back."""
        acquisition = asyncio.ensure_future(self._ask_server(self._limits.acquire_slot(name), None))
        try:
            return await asyncio.shield(acquisition)
        except asyncio.CancelledError:

            async def end_acquired_lease() -> None:
                lease = await acquisition
                if lease is not None:
                    await self._end_lease(lease)

            await run_shielded(end_acquired_lease())
            raise

    async def _hand_out(self, slot: Slot) -> None:
        self._held.add(slot)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                break
        else:
            await self.release(slot)
        await self._end_waiting()

    async def _end_waiting(self) -> None:
        """Gives back the lease that says that this run waits."""
        if self._waiting_lease is not None:
            lease, self._waiting_lease = self._waiting_lease, None
            await run_shielded(self._end_lease(lease))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await asyncio.gather(*(self._renew_slot(slot) for slot in self._held))
            lease = self._waiting_lease
            if lease is not None and not await self._ask_server(self._limits.renew_slot(lease), True):
                self._waiting_lease = None

    async def _renew_slot(self, slot: Slot) -> None:
        if not await self._ask_server(self._limits.renew_slot(slot.lease), True):
            slot.is_lost = True
            self._held.discard(slot)
            self._log.warning(
                "a slot of %s was lost, as the Prefect server had not heard of this run for %g s: what runs goes "
                "on, and another slot is taken before the next execution",
                self._names.sandboxes,
                LEASE_SECONDS,
            )

    async def _end_lease(self, lease: UUID) -> None:
        try:
            await self._limits.release_slot(lease)
        except httpx.HTTPError as error:
            self._log.warning(
                "a slot of %s could not be given back, and ends by itself: %s", self._names.sandboxes, error
            )

    async def _ask_server(self, request: Awaitable[T], default: T) -> T:
        """The server's answer to the request, `default` while it does not answer."""
        try:
            answer = await request
        except httpx.HTTPError as error:
            if not self._is_server_away:
                self._log.warning(
                    "the Prefect server does not answer on the limit %s: %s", self._names.sandboxes, error
                )
            self._is_server_away = True
            return default
        self._is_server_away = False
        return answer

    def _log_waiting(self) -> None:
        now = _read_clock()
        if not self._held and now >= self._next_log_at:
            self._next_log_at = now + LOG_INTERVAL_SECONDS
            self._log.info("waiting for one of the %s slots of %s", self._max_sandboxes, self._names.sandboxes)


@asynccontextmanager
async def open_slots(provider: SandboxProvider, run_id: str, log: Log) -> AsyncIterator[Slots]:
    """The slots of a flow run, all given back at the end. Raises ConfigurationError."""
    admission = Admission(log, is_gradual=provider.gradual)
    async with open_limits(provider, run_id) as limits:
        names = get_limit_names(provider)
        if limits is None or names is None:
            yield Slots(admission)
            return
        scope = "every flow run of this Prefect server" if limits.shared else "this process only: there is no server"
        if provider.max_sandboxes is not None:
            log.info("limit %s: %d sandboxes at one time, over %s", names.sandboxes, provider.max_sandboxes, scope)
        if provider.creations_per_second is not None:
            rate = provider.creations_per_second
            log.info("limit %s: %g new sandboxes a second, over %s", names.creations, rate, scope)
        slots = LimitedSlots(limits, names, provider, log, admission)
        task = asyncio.create_task(slots.run())
        try:
            yield slots
        finally:
            task.cancel()
            await asyncio.wait([task])
            await run_shielded(slots.close())


def _read_clock() -> float:
    return asyncio.get_running_loop().time()
