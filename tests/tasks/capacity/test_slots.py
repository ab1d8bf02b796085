"""Slots are not lost, and not gone without, when lanes and runs end at the wrong moment."""

import asyncio
import logging
from uuid import UUID

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import LocalSandbox
from rlm_batch.tasks.capacity.admission import Admission
from rlm_batch.tasks.capacity.server_limits import LimitNames, ProcessLimits, build_limit_settings
from rlm_batch.tasks.capacity.slots import Slots, open_slots
from rlm_batch.tasks.lane import Lane

pytestmark = pytest.mark.anyio
LOG = logging.getLogger("slots")


class Slow(ProcessLimits):
    """Limits whose answers take their time, as a server's do."""

    granted = asyncio.Event()

    async def acquire_slot(self, name: str) -> UUID | None:
        lease = await super().acquire_slot(name)
        self.granted.set()
        await asyncio.sleep(0.1)
        return lease


async def test_a_slot_that_is_granted_just_when_the_run_ends_is_given_back():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="ends")
    limits = Slow(build_limit_settings(block))
    shared = Slots(block, Admission(), LOG, limits, LimitNames("ends"))
    running = asyncio.create_task(shared.renew_leases())
    waiting = asyncio.create_task(shared.acquire())
    await limits.granted.wait()
    for task in (waiting, running):
        task.cancel()
    await asyncio.wait([waiting, running])
    await shared.close()
    assert await limits.count_slots_in_use("ends") == 0


async def test_a_lane_that_has_work_waits_for_its_slot_although_the_others_have_none_left():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="stays")
    with temporary_settings({PREFECT_API_URL: None}):
        async with open_slots(block, "a run", LOG) as shared:
            first, second = (Lane(block, "a run", reuse=False, timeout=5, slots=shared) for _ in range(2))
            assert await first.acquire()
            staying = asyncio.create_task(second.acquire_for_work())
            await asyncio.sleep(0.1)
            shared.dismiss_waiters()
            await asyncio.sleep(0.1)
            assert not staying.done()
            await first.release()
            async with asyncio.timeout(5):
                await staying
            await second.release()
    assert await ProcessLimits({}).count_slots_in_use("stays") == 0
