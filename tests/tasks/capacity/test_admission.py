"""A flow run comes to many sandboxes gently, and to as many as its provider has room for."""

import asyncio
import itertools
import logging
import math

import pytest

from rlm_batch.tasks.capacity.admission import (
    FIRST_OPENINGS_PER_SECOND,
    INITIAL_PERMITS,
    MAX_OPENINGS_PER_SECOND,
    REFUSAL_PAUSES_SECONDS,
    Admission,
    Permit,
)

pytestmark = pytest.mark.anyio


class Clock:
    """A time that passes when it is told to, and a provider that opens a sandbox in `boot` seconds, up to `space`."""

    def __init__(self, boot: float = 1.0, space: float = math.inf) -> None:
        self.now, self._boot, self._space = 0.0, boot, space
        self.admission = Admission(clock=lambda: self.now)
        self.started_at: list[float] = []
        self.refused_at: list[float] = []
        self.permits: list[Permit] = []
        self._opening: list[tuple[float, Permit]] = []

    def run(self, seconds: float, lanes: int) -> None:
        """Lets that many lanes ask for sandboxes through these seconds, and keep them."""
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
    """As many permits as there are at once."""
    permits = [await admission.acquire() for _ in range(INITIAL_PERMITS)]
    return [permit for permit in permits if permit is not None]


def test_a_small_run_opens_all_of_its_sandboxes_at_once():
    clock = Clock(boot=1.0)
    clock.run(0.0, lanes=INITIAL_PERMITS)
    assert len(clock.started_at) == INITIAL_PERMITS


def test_three_hundred_are_there_within_seconds_and_never_asked_for_in_a_burst():
    clock = Clock(boot=1.0)
    clock.run(20.0, lanes=300)
    assert len(clock.permits) == 300
    seconds = [sum(begin <= moment < begin + 1 for moment in clock.started_at) for begin in range(20)]
    assert seconds[0] <= INITIAL_PERMITS + FIRST_OPENINGS_PER_SECOND + 1
    assert max(seconds) <= MAX_OPENINGS_PER_SECOND + 1
    assert seconds[9:] == [0] * 11


def test_a_full_workspace_is_found_out_with_few_refusals_and_then_asked_one_at_a_time_and_less_and_less():
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


def test_a_sandbox_that_is_closed_is_replaced_at_once_and_what_others_leave_is_taken():
    clock = Clock(boot=0.2, space=10)
    clock.run(60.0, lanes=50)
    start_count = len(clock.started_at)
    clock.run(0.0, lanes=50)
    for permit in clock.permits[:3]:
        clock.admission.release(permit)
    del clock.permits[:3]
    clock.run(0.0, lanes=50)
    assert len(clock.started_at) == start_count + 3
    clock._space = 50  # others have left
    clock.run(40.0, lanes=50)
    assert len(clock.permits) == 50


def test_the_time_that_a_provider_asks_for_is_every_lanes_and_not_all_come_back_at_its_end():
    clock = Clock()
    admission = clock.admission
    permits = [admission.issue_permit() for _ in range(INITIAL_PERMITS)]
    for permit in permits[:-1]:
        admission.record_opening(permit)
    clock.now = 1.0
    admission.record_refusal(permits[-1], 60.0, "too many")
    clock.now = 2.0
    for permit in permits[:-1]:
        admission.release(permit)  # lanes that would each open another
    assert admission.compute_wait() == 59.0
    clock.now = 61.0
    assert admission.compute_wait() == 0.0
    permit = admission.issue_permit()
    clock.now = 70.0
    assert admission.compute_wait() == math.inf  # that one is being tried
    admission.record_opening(permit)
    assert admission.compute_wait() == 0.0
    admission.issue_permit()
    assert 0 < admission.compute_wait() <= 1 / FIRST_OPENINGS_PER_SECOND


def test_refusals_of_what_was_asked_for_together_count_as_one():
    admission = Clock().admission
    permits = [admission.issue_permit() for _ in range(INITIAL_PERMITS)]
    for permit in permits:
        admission.record_refusal(permit, None, "it is full")
    assert admission.compute_wait() == REFUSAL_PAUSES_SECONDS[0]


async def test_who_waits_for_a_place_can_be_cancelled_at_once_and_takes_none_away():
    admission = Admission()
    permits = await acquire_initial_permits(admission)
    admission.record_refusal(permits.pop(), 3600.0, "too many")
    waiting = [asyncio.create_task(admission.acquire()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(waiting)
    assert admission.permit_count == INITIAL_PERMITS - 1


async def test_a_place_that_is_given_just_when_its_lane_is_cancelled_comes_back():
    admission = Admission()
    permits = await acquire_initial_permits(admission)
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    admission.release(permits.pop())
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert admission.permit_count == INITIAL_PERMITS - 1


async def test_lanes_that_have_work_come_first_and_the_others_are_told_when_there_is_no_more():
    admission = Admission()
    first, second, *_ = await acquire_initial_permits(admission)
    admission.record_opening(second)
    admission.record_refusal(first, None, "it is full")
    idle = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    busy = asyncio.create_task(admission.acquire(is_urgent=True))
    await asyncio.sleep(0)
    admission.max_permits = admission.permit_count  # what follows is one permit
    admission.release(second)
    async with asyncio.timeout(60):
        assert await busy is not None
    assert not idle.done()
    admission.dismiss_waiters()
    async with asyncio.timeout(60):
        assert await idle is None


async def test_many_refusals_are_one_line_of_the_log(caplog):
    admission = Admission(logging.getLogger("ramp"))
    permits = await acquire_initial_permits(admission)
    for permit in permits:
        admission.record_refusal(permit, None, "the workspace is full")
    (line,) = caplog.messages
    assert "the workspace is full" in line


async def test_a_provider_on_this_machine_is_not_waited_for():
    admission = Admission(is_gradual=False)
    async with asyncio.timeout(60):
        assert all([await admission.acquire() for _ in range(1000)])
