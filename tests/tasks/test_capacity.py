"""Capacity of a run: it opens sandboxes gradually, up to its provider's capacity, and loses no slot."""

import asyncio
import itertools
import logging
import math
from typing import Any
from uuid import UUID

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import LocalSandbox
from rlm_batch.flows.engine.lane import Lane
from rlm_batch.flows.engine.run import Run
from rlm_batch.flows.parameters import Options
from rlm_batch.flows.plan import Plan
from rlm_batch.tasks.capacity.admission import (
    FIRST_OPENINGS_PER_SECOND,
    INITIAL_PERMITS,
    MAX_OPENINGS_PER_SECOND,
    Admission,
    Permit,
)
from rlm_batch.tasks.capacity.limits import ProcessLimits, build_limit_settings
from rlm_batch.tasks.capacity.slots import Slots, open_slots

pytestmark = pytest.mark.anyio


class Clock:
    """A simulated clock and a provider that opens a sandbox in `boot` seconds and has room for `space` of them."""

    def __init__(self, boot: float = 1.0, space: float = math.inf) -> None:
        self.now, self._boot, self._space = 0.0, boot, space
        self.admission = Admission(clock=lambda: self.now)
        self.started_at: list[float] = []
        self.refused_at: list[float] = []
        self.permits: list[Permit] = []
        self._opening: list[tuple[float, Permit]] = []

    def run(self, seconds: float, lanes: int) -> None:
        """Simulate `seconds` in which `lanes` lanes ask for sandboxes and keep them."""
        until = self.now + seconds
        while True:
            for ready, permit in list(self._opening):
                if ready <= self.now:
                    self._opening.remove((ready, permit))
                    if len(self.permits) < self._space:
                        self.permits.append(permit)
                        self.admission.record_opening(permit)
                    else:
                        self.refused_at.append(self.now)
                        self.admission.record_refusal(permit, None, "it is full")
            while len(self.permits) + len(self._opening) < lanes and self.admission.compute_wait() <= 0:
                self.started_at.append(self.now)
                self._opening.append((self.now + self._boot, self.admission.issue_permit()))
            moments = [ready for ready, _ in self._opening]
            if len(self.permits) + len(self._opening) < lanes:
                moments.append(self.now + self.admission.compute_wait())
            self.now = min(moments, default=math.inf)
            if self.now > until:
                self.now = until
                return


async def acquire_initial_permits(admission: Admission) -> list[Permit]:
    """Return the permits that are available at once."""
    permits = [await admission.acquire() for _ in range(INITIAL_PERMITS)]
    return [permit for permit in permits if permit is not None]


def test_three_hundred_sandboxes_open_within_seconds_without_a_burst():
    clock = Clock(boot=1.0)
    clock.run(20.0, lanes=300)
    assert len(clock.permits) == 300
    seconds = [sum(begin <= moment < begin + 1 for moment in clock.started_at) for begin in range(20)]
    assert seconds[0] <= INITIAL_PERMITS + FIRST_OPENINGS_PER_SECOND + 1
    assert max(seconds) <= MAX_OPENINGS_PER_SECOND + 1
    assert seconds[9:] == [0] * 11


def test_a_full_workspace_causes_few_refusals_and_ever_rarer_attempts():
    clock = Clock(boot=0.2, space=100)
    clock.run(10.0, lanes=300)
    assert len(clock.permits) == 100
    first = clock.refused_at[0]
    assert sum(moment < first + 0.5 for moment in clock.refused_at) <= MAX_OPENINGS_PER_SECOND * 0.2 + 1
    before = len(clock.refused_at)
    clock.run(300.0, lanes=300)
    later = clock.refused_at[before:]
    assert 300 / 30 - 2 <= len(later) <= 300 / 30 + 3
    assert min(after - moment for moment, after in itertools.pairwise(later)) >= 1


def test_a_closed_sandbox_is_replaced_at_once_and_freed_room_is_used():
    clock = Clock(boot=0.2, space=10)
    clock.run(60.0, lanes=50)
    start_count = len(clock.started_at)
    clock.run(0.0, lanes=50)
    for permit in clock.permits[:3]:
        clock.admission.release(permit)
    del clock.permits[:3]
    clock.run(0.0, lanes=50)
    assert len(clock.started_at) == start_count + 3
    clock._space = 50  # other users have left
    clock.run(40.0, lanes=50)
    assert len(clock.permits) == 50


def test_all_lanes_respect_retry_after_and_return_gradually():
    clock = Clock()
    admission = clock.admission
    permits = [admission.issue_permit() for _ in range(INITIAL_PERMITS)]
    for permit in permits[:-1]:
        admission.record_opening(permit)
    clock.now = 1.0
    admission.record_refusal(permits[-1], 60.0, "too many")
    clock.now = 2.0
    for permit in permits[:-1]:
        admission.release(permit)  # each lane would open another sandbox
    assert admission.compute_wait() == 59.0
    clock.now = 61.0
    assert admission.compute_wait() == 0.0
    permit = admission.issue_permit()
    clock.now = 70.0
    assert admission.compute_wait() == math.inf  # the provider is being tried with that permit
    admission.record_opening(permit)
    assert admission.compute_wait() == 0.0
    admission.issue_permit()
    assert 0 < admission.compute_wait() <= 1 / FIRST_OPENINGS_PER_SECOND


def test_refusals_of_simultaneous_openings_count_as_one():
    admission = Clock().admission
    permits = [admission.issue_permit() for _ in range(INITIAL_PERMITS)]
    for permit in permits:
        admission.record_refusal(permit, None, "it is full")
    assert admission.compute_wait() == 1.0


async def test_cancelled_lanes_take_no_permit():
    admission = Admission()
    permits = await acquire_initial_permits(admission)
    granted, *waiting = [asyncio.create_task(admission.acquire()) for _ in range(20)]
    await asyncio.sleep(0)
    admission.release(permits.pop())  # The first lane gets its permit as it is cancelled.
    for task in (granted, *waiting):
        task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([granted, *waiting])
    assert granted.cancelled()
    assert admission.permit_count == INITIAL_PERMITS - 1


async def test_lanes_with_work_get_permits_first_and_idle_lanes_are_dismissed():
    admission = Admission()
    first, second, *_ = await acquire_initial_permits(admission)
    admission.record_opening(second)
    admission.record_refusal(first, None, "it is full")
    idle = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    busy = asyncio.create_task(admission.acquire(is_urgent=True))
    await asyncio.sleep(0)
    admission.max_permits = admission.permit_count  # only one permit is available from here on
    admission.release(second)
    async with asyncio.timeout(60):
        assert await busy is not None
    assert not idle.done()
    admission.dismiss_waiters()
    async with asyncio.timeout(60):
        assert await idle is None


LOG = logging.getLogger("slots")


class Slow(ProcessLimits):
    """Limits that grant a slot but answer later, as a server may."""

    def __init__(self, settings: dict[str, dict[str, Any]]) -> None:
        super().__init__(settings)
        self.granted, self.may_answer = asyncio.Event(), asyncio.Event()

    async def acquire_slot(self, name: str) -> UUID | None:
        lease = await super().acquire_slot(name)
        self.granted.set()
        await self.may_answer.wait()
        return lease


async def test_a_slot_granted_as_the_run_ends_is_returned():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="ends")
    limits = Slow(build_limit_settings(block))
    shared = Slots(block, Admission(), LOG, limits)
    running = asyncio.create_task(shared.renew_leases())
    waiting = asyncio.create_task(shared.acquire())
    await limits.granted.wait()
    for task in (waiting, running):
        task.cancel()
    await asyncio.sleep(0)
    limits.may_answer.set()
    await asyncio.wait([waiting, running])
    await shared.close()
    assert await limits.count_slots_in_use("ends") == 0


async def test_a_lane_with_work_keeps_waiting_when_others_are_dismissed():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="stays")
    with temporary_settings({PREFECT_API_URL: None}):
        async with open_slots(block, "a run", LOG) as shared:
            run = Run(options=Options(), plan=Plan(total=2), provider=block, run_id="a run")
            first, second = Lane(run, shared), Lane(run, shared)
            assert await first.acquire()
            staying = asyncio.create_task(second.acquire_for_work())
            for _ in range(20):  # let it start to wait
                await asyncio.sleep(0)
            shared.dismiss_waiters()
            done, _ = await asyncio.wait([staying], timeout=0.1)
            assert not done
            await first.release()
            await staying
            await second.release()
    assert await ProcessLimits({}).count_slots_in_use("stays") == 0
