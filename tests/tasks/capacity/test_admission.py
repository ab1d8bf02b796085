"""A flow run comes to many sandboxes gently, and to as many as its provider has room for."""

import asyncio
import itertools
import logging
import math

import pytest

from rlm_batch.tasks.capacity import admission as ramp
from rlm_batch.tasks.capacity.admission import AT_ONCE, FIRST_PACE, LAST_PACE, Place, Ramp, Room

pytestmark = pytest.mark.anyio


class Clock:
    """A time that passes when it is told to, and a provider that opens a sandbox in `boot` seconds, up to `space`."""

    def __init__(self, room: Room, boot: float, space: float = math.inf) -> None:
        self.now, self.room, self._boot, self._space = 0.0, room, boot, space
        self.begun: list[float] = []
        self.refused: list[float] = []
        self.places: list[Place] = []
        self._opening: list[tuple[float, Place]] = []

    def run(self, seconds: float, lanes: int) -> None:
        """Lets that many lanes ask for sandboxes through these seconds, and keep them."""
        until = self.now + seconds
        while True:
            for ready, place in list(self._opening):
                if ready <= self.now:
                    self._opening.remove((ready, place))
                    if len(self.places) < self._space:
                        self.places.append(place)
                        self.room.opened(place)
                    else:
                        self.refused.append(self.now)
                        self.room.refused(place, self.now, None)
            while len(self.places) + len(self._opening) < lanes and self.room.wait(self.now) <= 0:
                self.begun.append(self.now)
                self._opening.append((self.now + self._boot, self.room.take(self.now)))
            moments = [ready for ready, _ in self._opening]
            if len(self.places) + len(self._opening) < lanes:
                moments.append(self.now + self.room.wait(self.now))
            self.now = min(moments, default=math.inf)
            if self.now > until:
                self.now = until
                return


async def taken(gate: Ramp) -> list[Place]:
    """As many places as there are at once."""
    places = [await gate.take() for _ in range(AT_ONCE)]
    return [place for place in places if place is not None]


def test_a_small_run_opens_all_of_its_sandboxes_at_once():
    clock = Clock(Room(0.0), boot=1.0)
    clock.run(0.0, lanes=AT_ONCE)
    assert len(clock.begun) == AT_ONCE


def test_three_hundred_are_there_within_seconds_and_never_asked_for_in_a_burst():
    clock = Clock(Room(0.0), boot=1.0)
    clock.run(20.0, lanes=300)
    assert len(clock.places) == 300
    seconds = [sum(begin <= moment < begin + 1 for moment in clock.begun) for begin in range(20)]
    assert seconds[0] <= AT_ONCE + FIRST_PACE + 1
    assert max(seconds) <= LAST_PACE + 1
    assert seconds[9:] == [0] * 11


def test_a_full_workspace_is_found_out_with_few_refusals_and_then_asked_one_at_a_time_and_less_and_less():
    clock = Clock(Room(0.0), boot=0.2, space=100)
    clock.run(10.0, lanes=300)
    assert len(clock.places) == 100
    first = clock.refused[0]
    assert sum(moment < first + 0.5 for moment in clock.refused) <= LAST_PACE * 0.2 + 1
    before = len(clock.refused)
    clock.run(300.0, lanes=300)
    later = clock.refused[before:]
    assert 300 / 30 - 2 <= len(later) <= 300 / 30 + 3
    assert min(after - moment for moment, after in itertools.pairwise(later)) >= 1


def test_what_others_leave_is_taken_as_soon_as_one_more_was_opened():
    clock = Clock(Room(0.0), boot=0.2, space=10)
    clock.run(60.0, lanes=50)
    clock._space = 50
    clock.run(40.0, lanes=50)
    assert len(clock.places) == 50


def test_a_sandbox_that_is_closed_is_replaced_at_once_also_where_the_workspace_is_full():
    clock = Clock(Room(0.0), boot=0.2, space=10)
    clock.run(60.0, lanes=50)
    asked = len(clock.begun)
    clock.run(0.0, lanes=50)
    for place in clock.places[:3]:
        clock.room.leave(place, clock.now)
    del clock.places[:3]
    clock.run(0.0, lanes=50)
    assert len(clock.begun) == asked + 3


def test_the_time_that_a_provider_asks_for_is_every_lanes_and_not_all_come_back_at_its_end():
    room = Room(0.0)
    places = [room.take(0.0) for _ in range(AT_ONCE)]
    for place in places[:-1]:
        room.opened(place)
    room.refused(places[-1], 1.0, asked=60.0)
    for place in places[:-1]:
        room.leave(place, 2.0)  # lanes that would each open another
    assert room.wait(2.0) == 59.0
    assert room.wait(61.0) == 0.0
    place = room.take(61.0)
    assert room.wait(70.0) == math.inf  # that one is being tried
    room.opened(place)
    assert room.wait(70.0) == 0.0
    room.take(70.0)
    assert 0 < room.wait(70.0) <= 1 / FIRST_PACE


def test_refusals_of_what_was_asked_for_together_count_as_one():
    room = Room(0.0)
    places = [room.take(0.0) for _ in range(AT_ONCE)]
    for place in places:
        room.refused(place, 1.0, None)
    assert room.wait(1.0) == ramp.LOOK_AGAIN[0]


async def test_who_waits_for_a_place_can_be_cancelled_at_once_and_takes_none_away():
    gate = Ramp()
    places = await taken(gate)
    gate.refused(places.pop(), 3600.0, "too many")
    waiting = [asyncio.create_task(gate.take()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(waiting)
    assert gate.room.held == AT_ONCE - 1


async def test_a_place_that_is_given_just_when_its_lane_is_cancelled_comes_back():
    gate = Ramp()
    places = await taken(gate)
    waiting = asyncio.create_task(gate.take())
    await asyncio.sleep(0)
    gate.leave(places.pop())
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert gate.room.held == AT_ONCE - 1


async def test_lanes_that_have_work_come_first_and_the_others_are_told_when_there_is_no_more():
    gate = Ramp()
    first, second, *_ = await taken(gate)
    gate.opened(second)
    gate.refused(first, None, "it is full")
    idle = asyncio.create_task(gate.take())
    await asyncio.sleep(0)
    busy = asyncio.create_task(gate.take(first=True))
    await asyncio.sleep(0)
    gate.room.most = gate.room.held  # what follows is one place
    gate.leave(second)
    async with asyncio.timeout(5):
        assert await busy is not None
    assert not idle.done()
    gate.enough()
    async with asyncio.timeout(5):
        assert await idle is None


async def test_many_refusals_are_one_line_of_the_log(caplog):
    gate = Ramp(logging.getLogger("ramp"))
    places = await taken(gate)
    for place in places:
        gate.refused(place, None, "the workspace is full")
    (line,) = caplog.messages
    assert "the workspace is full" in line


async def test_a_provider_on_this_machine_is_not_waited_for():
    gate = Ramp(gradual=False)
    async with asyncio.timeout(5):
        assert all([await gate.take() for _ in range(1000)])
