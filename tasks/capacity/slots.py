"""A flow run's slots of its provider's limit: its lanes hold them for many executions, and give them to other runs.

Prefect's server notifies nobody of a released slot, nor a holder of others that wait. So a run polls, more often while
it has no slot at all; and while it has none it holds a slot of another limit (`waiting`), by which runs that have slots
see that they should hand one over.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from uuid import UUID

import httpx

from ...blocks.provider import SandboxProvider
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import RlmBatchError
from ..server_errors import describe_server_error
from .admission import Admission, Log
from .server_limits import LEASE_SECONDS, LimitNames, Limits, ProcessLimits, get_limit_names, open_limits

T = TypeVar("T")

POLL_SECONDS = 1.0  # between two requests of a run that has no slot
POLL_FOR_MORE_SECONDS = 3.0  # of a run that has some, and after one was handed over: the others come first
LOCAL_POLL_FACTOR = 0.05  # of these, where the limit is held in this process: there a request costs nothing
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
    """The slots of one flow run, which its lanes share. Without `limits` each lane has its slot at once.

    Whoever has a slot waits for a permit of `admission` before it opens a sandbox. With limits, which have these
    `names`, `renew_leases` has to run for as long as they are used.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        admission: Admission,
        log: Log,
        limits: Limits | None = None,
        names: LimitNames | None = None,
    ) -> None:
        self.admission = admission
        self._log = log
        self._limits = limits or ProcessLimits({})
        self._names = names or LimitNames("")
        self._max_sandboxes = provider.max_sandboxes if limits else None
        self._creations_per_second = provider.creations_per_second if limits else None
        self._request_lock = asyncio.Lock()  # one lane requests at a time: the one that has waited longest
        self._waiter_count = 0
        self._dismissal = asyncio.Event()  # of the lanes that wait now
        self._held: set[Slot] = set()
        self._waiting_lease: UUID | None = None  # of `waiting`, held while this run waits and has no slot
        self._endings: set[asyncio.Task[None]] = set()  # of leases of `waiting`
        self._next_request_at = 0.0
        self._next_check_at = 0.0
        self._next_log_at = 0.0
        self._creation_lock = asyncio.Lock()
        self._is_server_away = False  # it did not answer the last request
        factor = 1.0 if self._limits.shared else LOCAL_POLL_FACTOR
        self._poll_seconds, self._poll_for_more_seconds = factor * POLL_SECONDS, factor * POLL_FOR_MORE_SECONDS

    async def acquire(self) -> Slot | None:
        """Waits for a slot; None once `dismiss_waiters` was called."""
        if self._max_sandboxes is None:
            return Slot(UUID(int=0), 0.0)
        dismissal = self._dismissal
        self._waiter_count += 1
        try:
            async with self._request_lock:
                return await self._poll_for_slot(dismissal)
        finally:
            self._waiter_count -= 1
            if self._held or not self._waiter_count:
                self._end_waiting()

    async def release(self, slot: Slot) -> None:
        """Gives the slot back, whose sandbox was removed."""
        if slot in self._held:
            self._held.remove(slot)
            await run_shielded(self._end_lease(slot.lease))

    async def should_hand_over(self, slot: Slot) -> bool:
        """Whether to give the slot back between two executions, for other runs that wait."""
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
        """Gives None to all that wait for a slot or a permit, as there is no more work."""
        self.admission.dismiss_waiters()
        self._dismissal.set()
        self._dismissal = asyncio.Event()

    def end(self, error: RlmBatchError) -> None:
        """Has no sandbox opened any more, for that reason; those that are open stay."""
        self.admission.end(error)
        self.dismiss_waiters()

    async def wait_for_creation(self) -> None:
        """Waits until a sandbox may be created."""
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
        self._end_waiting()
        await asyncio.gather(*self._endings, *(self.release(slot) for slot in self._held))

    async def _poll_for_slot(self, dismissal: asyncio.Event) -> Slot | None:
        """Requests a slot until it is granted one, or until its lane is dismissed."""
        while not dismissal.is_set():
            pause = self._next_request_at - _read_clock()
            if pause <= 0:
                lease = await self._acquire_lease(self._names.sandboxes)
                if lease is not None:
                    slot = Slot(lease, _read_clock())
                    self._held.add(slot)
                    if not dismissal.is_set():
                        return slot
                    await self.release(slot)
                    break
                if not self._held:
                    await self._announce_waiting()
                interval = self._poll_for_more_seconds if self._held else self._poll_seconds
                pause = interval * random.uniform(0.75, 1.25)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await dismissal.wait()
        return None

    async def _announce_waiting(self) -> None:
        """Tells the log and, with a lease of `waiting`, the runs that have slots that this one waits and has none."""
        if _read_clock() >= self._next_log_at:
            self._next_log_at = _read_clock() + LOG_INTERVAL_SECONDS
            self._log.info("waiting for one of the %s slots of %s", self._max_sandboxes, self._names.sandboxes)
        if self._waiting_lease is None:
            self._waiting_lease = await self._acquire_lease(self._names.waiting)

    async def _acquire_lease(self, name: str) -> UUID | None:
        """A lease of the limit, None where there is none now. One that comes during a cancellation is given back."""
        acquisition = asyncio.ensure_future(self._ask_server(self._limits.acquire_slot(name), None))
        try:
            return await asyncio.shield(acquisition)
        except asyncio.CancelledError:

            async def end_acquired_lease() -> None:
                if (lease := await acquisition) is not None:
                    await self._end_lease(lease)

            await run_shielded(end_acquired_lease())
            raise

    def _end_waiting(self) -> None:
        """Gives back the lease that says that this run waits: beside the lane, which has its slot."""
        if self._waiting_lease is not None:
            ending = asyncio.create_task(self._end_lease(self._waiting_lease))
            self._waiting_lease = None
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def renew_leases(self) -> None:
        """Renews the slots that are held, until it is cancelled."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await asyncio.gather(*(self._renew_slot(slot) for slot in self._held))
                lease = self._waiting_lease
                if lease is not None and not await self._ask_server(self._limits.renew_slot(lease), True):
                    self._waiting_lease = None
            except Exception as error:  # noqa: BLE001 - whatever it is: leases that nobody renews are given away
                self._log.warning("the slots of %s could not be renewed: %r", self._names.sandboxes, error)

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
                "a slot of %s could not be given back, and ends by itself: %s",
                self._names.sandboxes,
                describe_server_error(error),
            )

    async def _ask_server(self, request: Awaitable[T], default: T) -> T:
        """The server's answer to the request, `default` while it does not answer."""
        try:
            answer = await request
        except httpx.HTTPError as error:
            if not self._is_server_away:
                self._log.warning(
                    "the Prefect server does not answer on the limit %s: %s",
                    *(self._names.sandboxes, describe_server_error(error)),
                )
            self._is_server_away = True
            return default
        self._is_server_away = False
        return answer


def _read_clock() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def open_slots(provider: SandboxProvider, run_id: str, log: Log) -> AsyncIterator[Slots]:
    """The slots of a flow run, all given back at the end. Raises ConfigurationError."""
    admission = Admission(log, is_gradual=provider.gradual)
    async with open_limits(provider, run_id) as limits:
        names = get_limit_names(provider)
        slots = Slots(provider, admission, log, limits, names)
        if limits is None or names is None:
            yield slots
            return
        scope = "every flow run of this Prefect server" if limits.shared else "this process only: there is no server"
        if provider.max_sandboxes is not None:
            log.info("limit %s: %d sandboxes at one time, over %s", names.sandboxes, provider.max_sandboxes, scope)
        if provider.creations_per_second is not None:
            rate = provider.creations_per_second
            log.info("limit %s: %g new sandboxes a second, over %s", names.creations, rate, scope)
        task = asyncio.create_task(slots.renew_leases())
        try:
            yield slots
        finally:
            task.cancel()
            await asyncio.wait([task])
            await run_shielded(slots.close())
