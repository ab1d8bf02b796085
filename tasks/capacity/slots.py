"""A flow run's slots of its provider's limit: its lanes take them, keep them for many executions, and hand them over.

A released slot wakes nobody, and a holder is not told that others wait. So a run asks again and again, more often
while it has no slot at all; and while it has none it holds a slot of a limit of its own (`waiting`), by which runs that
have slots see that they should hand one over.
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

POLL_SECONDS = 1.0  # seconds between two questions of a run that has no slot
POLL_FOR_MORE_SECONDS = (
    3.0  # of one that has some, and before one that has handed a slot over asks: the others come first
)
LOCAL_POLL_SECONDS = 0.05  # of one whose limit is held in this process, where a question costs nothing
LOCAL_POLL_FOR_MORE_SECONDS = 0.15
WAITING_CHECK_SECONDS = 2.0  # seconds between two looks whether others wait
MIN_HOLD_OF_SEVERAL_SECONDS = 10.0  # seconds that a slot is held before it is handed over, by a run that has others
MIN_HOLD_SECONDS = 60.0  # and by one that has no other: it pays for a new sandbox, and waits itself
RENEW_SECONDS = 15.0  # seconds between two renewals of a lease of 60: a server may be away for 45
LOG_INTERVAL_SECONDS = 60.0  # seconds between two lines of the log that say what is waited for


class Slot:
    """The right to have one sandbox."""

    def __init__(self, lease: UUID, since: float) -> None:
        self.lease = lease
        self.granted_at = since
        self.is_lost = False


class Slots:
    """What the lanes of one flow run share. Without a limit each has its slot at once.

    Whoever has a slot waits for a place of the `ramp` before it opens a sandbox.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = Admission() if admission is None else admission

    async def acquire(self) -> Slot | None:
        """A slot, as soon as there is one; None once `enough` was called."""
        return Slot(UUID(int=0), 0.0)

    async def release(self, slot: Slot) -> None:
        """The sandbox of this slot has been removed."""

    async def should_hand_over(self, slot: Slot) -> bool:
        """Whether the slot is to be given back between two executions, for others that wait."""
        return False

    def dismiss_waiters(self) -> None:
        """There is no more work: whoever waits for a slot, or for a place, gets None."""
        self.admission.dismiss_waiters()

    async def wait_for_creation(self) -> None:
        """Waits until a sandbox may be created."""


class LimitedSlots(Slots):
    """Those of a provider with limits. `run` has to run as long as they are used."""

    def __init__(
        self, limits: Limits, names: LimitNames, provider: SandboxProvider, log: Log, admission: Admission | None = None
    ) -> None:
        super().__init__(admission)
        self._limits = limits
        self._names = names
        self._most = provider.max_sandboxes
        self._rate = provider.creations_per_second
        self._log = log
        self._waiters: deque[asyncio.Future[Slot | None]] = deque()
        self._asked = asyncio.Event()
        self._held: set[Slot] = set()
        self._flag: UUID | None = None  # held while this run waits and has no slot
        self._stays_out_until = 0.0
        self._looks_at = 0.0
        self._says_at = 0.0
        self._creating = asyncio.Lock()
        self._away = False  # the server did not answer the last time
        self._broken: BaseException | None = None
        self._pause, self._pause_for_more = (
            (POLL_SECONDS, POLL_FOR_MORE_SECONDS)
            if limits.shared
            else (LOCAL_POLL_SECONDS, LOCAL_POLL_FOR_MORE_SECONDS)
        )

    async def run(self) -> None:
        """Takes slots for those that wait, and keeps those that are held. Ends when it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask())
                group.create_task(self._renew())
        except BaseExceptionGroup as errors:
            self._broken = errors.exceptions[0]
            while self._waiters:
                self._waiters.popleft().set_exception(self._broken)

    async def acquire(self) -> Slot | None:
        if self._most is None:
            return await super().acquire()
        if self._broken is not None:
            raise self._broken
        waiter: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._asked.set()
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
            await run_shielded(self._end(slot.lease))

    async def should_hand_over(self, slot: Slot) -> bool:
        if slot.is_lost:
            return True
        now = _now()
        turn = MIN_HOLD_OF_SEVERAL_SECONDS if len(self._held) > 1 else MIN_HOLD_SECONDS
        if slot not in self._held or now - slot.granted_at < turn or now < self._looks_at:
            return False
        self._looks_at = now + WAITING_CHECK_SECONDS  # one lane at a time
        if not await self._answer(self._limits.count_slots_in_use(self._names.waiting), 0):
            return False
        self._stays_out_until = now + self._pause_for_more
        return True

    def dismiss_waiters(self) -> None:
        super().dismiss_waiters()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_creation(self) -> None:
        if self._rate is None:
            return
        async with self._creating:  # one question at a time
            while True:
                if await self._answer(self._limits.acquire_rate_slot(self._names.creations), False):
                    return
                await asyncio.sleep(POLL_SECONDS if self._away else random.uniform(0.2, 0.6) / self._rate)

    async def close(self) -> None:
        """Gives back whatever is held."""
        self.dismiss_waiters()
        leases = [slot.lease for slot in self._held] + ([self._flag] if self._flag is not None else [])
        self._held.clear()
        self._flag = None
        await asyncio.gather(*(self._end(lease) for lease in leases))

    async def _ask(self) -> None:
        while True:
            await self._asked.wait()
            if self._waiters:
                await self._serve()
            if not self._waiters:
                self._asked.clear()
                await self._lower()

    async def _serve(self) -> None:
        """One question, for the first that waits; and the pause after a refusal."""
        now = _now()
        if now < self._stays_out_until:
            await asyncio.sleep(self._stays_out_until - now)
        lease = await self._granted(self._names.sandboxes)
        if lease is not None:
            await self._hand(Slot(lease, _now()))
            return
        self._say()
        if not self._held and self._flag is None:
            self._flag = await self._granted(self._names.waiting)
        await asyncio.sleep((self._pause_for_more if self._held else self._pause) * random.uniform(0.75, 1.25))

    async def _granted(self, name: str) -> UUID | None:
        """A slot, None where there is none now. One that is granted while the run ends is given back."""
        taking = asyncio.ensure_future(self._answer(self._limits.acquire_slot(name), None))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:

            async def undo() -> None:
                lease = await taking
                if lease is not None:
                    await self._end(lease)

            await run_shielded(undo())
            raise

    async def _hand(self, slot: Slot) -> None:
        self._held.add(slot)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                break
        else:
            await self.release(slot)
        await self._lower()

    async def _lower(self) -> None:
        """Waits no longer, or has a slot."""
        if self._flag is not None:
            flag, self._flag = self._flag, None
            await run_shielded(self._end(flag))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await asyncio.gather(*(self._renew_one(slot) for slot in self._held))
            if self._flag is not None and not await self._answer(self._limits.renew_slot(self._flag), True):
                self._flag = None

    async def _renew_one(self, slot: Slot) -> None:
        if not await self._answer(self._limits.renew_slot(slot.lease), True):
            slot.is_lost = True
            self._held.discard(slot)
            self._log.warning(
                "a slot of %s was lost, as the Prefect server had not heard of this run for %g s: what runs goes "
                "on, and another slot is taken before the next execution",
                self._names.sandboxes,
                LEASE_SECONDS,
            )

    async def _end(self, lease: UUID) -> None:
        try:
            await self._limits.release_slot(lease)
        except httpx.HTTPError as error:
            self._log.warning(
                "a slot of %s could not be given back, and ends by itself: %s", self._names.sandboxes, error
            )

    async def _answer(self, question: Awaitable[T], otherwise: T) -> T:
        """What the server says, or `otherwise` while it does not answer."""
        try:
            found = await question
        except httpx.HTTPError as error:
            if not self._away:
                self._log.warning(
                    "the Prefect server does not answer on the limit %s: %s", self._names.sandboxes, error
                )
            self._away = True
            return otherwise
        self._away = False
        return found

    def _say(self) -> None:
        now = _now()
        if not self._held and now >= self._says_at:
            self._says_at = now + LOG_INTERVAL_SECONDS
            self._log.info("waiting for one of the %s slots of %s", self._most, self._names.sandboxes)


@asynccontextmanager
async def open_slots(provider: SandboxProvider, run_id: str, log: Log) -> AsyncIterator[Slots]:
    """The slots of a flow run, whatever is held at the end given back. Raises ConfigurationError."""
    admission = Admission(log, is_gradual=provider.gradual)
    async with open_limits(provider, run_id) as limits:
        names = get_limit_names(provider)
        if limits is None or names is None:
            yield Slots(admission)
            return
        where = "every flow run of this Prefect server" if limits.shared else "this process only: there is no server"
        if provider.max_sandboxes is not None:
            log.info("limit %s: %d sandboxes at one time, over %s", names.sandboxes, provider.max_sandboxes, where)
        if provider.creations_per_second is not None:
            rate = provider.creations_per_second
            log.info("limit %s: %g new sandboxes a second, over %s", names.creations, rate, where)
        slots = LimitedSlots(limits, names, provider, log, admission)
        running = asyncio.create_task(slots.run())
        try:
            yield slots
        finally:
            running.cancel()
            await asyncio.wait([running])
            await run_shielded(slots.close())


def _now() -> float:
    return asyncio.get_running_loop().time()
