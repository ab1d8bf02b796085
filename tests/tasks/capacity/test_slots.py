"""Slots are not lost, and not gone without, when lanes and runs end at the wrong moment."""

import asyncio
import logging
from typing import Any
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
    """Limits that grant a slot and answer later, as a server may."""

    def __init__(self, settings: dict[str, dict[str, Any]]) -> None:
        super().__init__(settings)
        self.granted, self.may_answer = asyncio.Event(), asyncio.Event()

    async def acquire_slot(self, name: str) -> UUID | None:
        lease = await super().acquire_slot(name)
        self.granted.set()
        await self.may_answer.wait()
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
    await asyncio.sleep(0)
    limits.may_answer.set()
    await asyncio.wait([waiting, running])
    await shared.close()
    assert await limits.count_slots_in_use("ends") == 0


async def test_a_lane_that_has_work_waits_for_its_slot_although_the_others_have_none_left():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="stays")
    with temporary_settings({PREFECT_API_URL: None}):
        async with open_slots(block, "a run", LOG) as shared:
            first, second = (Lane(block, "a run", reuse=False, timeout=100, slots=shared) for _ in range(2))
            assert await first.acquire()
            staying = asyncio.create_task(second.acquire_for_work())
            for _ in range(20):  # until it waits
                await asyncio.sleep(0)
            shared.dismiss_waiters()
            done, _ = await asyncio.wait([staying], timeout=0.1)
            assert not done
            await first.release()
            await staying
            await second.release()
    assert await ProcessLimits({}).count_slots_in_use("stays") == 0


class Unwilling(ProcessLimits):
    """Limits that fail in a way that nobody foresaw, and do not take a lease back before they may."""

    def __init__(self, settings: dict[str, dict[str, Any]]) -> None:
        super().__init__(settings)
        self.renewals = 0
        self.was_renewed_after_error = asyncio.Event()
        self.may_release = asyncio.Event()
        self.is_refusing = True

    async def renew_slot(self, lease: UUID) -> bool:
        self.renewals += 1
        if self.renewals == 1:
            raise KeyError("of a library")
        self.was_renewed_after_error.set()
        return await super().renew_slot(lease)

    async def acquire_slot(self, name: str) -> UUID | None:
        if self.is_refusing and not name.endswith("waiting"):
            self.is_refusing = False
            return None  # so that the run says that it waits
        return await super().acquire_slot(name)

    async def release_slot(self, lease: UUID) -> None:
        await self.may_release.wait()
        await super().release_slot(lease)


async def test_leases_are_renewed_also_after_an_error_that_nobody_foresaw(monkeypatch, caplog):
    monkeypatch.setattr("rlm_batch.tasks.capacity.slots.RENEW_SECONDS", 0.02)
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="renewed")
    limits = Unwilling(build_limit_settings(block))
    shared = Slots(block, Admission(), LOG, limits, LimitNames("renewed"))
    renewing = asyncio.create_task(shared.renew_leases())
    assert await shared.acquire() is not None
    await limits.was_renewed_after_error.wait()
    renewing.cancel()
    await asyncio.wait([renewing])
    limits.may_release.set()
    await shared.close()
    assert "the slots of renewed could not be renewed: KeyError('of a library')" in caplog.text


async def test_a_lane_has_its_slot_before_the_server_has_heard_that_its_run_waits_no_more():
    block = LocalSandbox(isolation="none", max_sandboxes=1, limit_name="unwilling")
    limits = Unwilling(build_limit_settings(block))
    shared = Slots(block, Admission(), LOG, limits, LimitNames("unwilling"))
    assert await shared.acquire() is not None
    assert await limits.count_slots_in_use(LimitNames("unwilling").waiting) == 1
    limits.may_release.set()
    await shared.close()
    assert await limits.count_slots_in_use(LimitNames("unwilling").waiting) == 0
