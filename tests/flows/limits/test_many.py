"""A run of many workers settles at what its provider has room for, and ends in good order wherever it is stopped."""

import asyncio
import logging
import os
import resource
from contextlib import suppress
from typing import Any

import pytest

from rlm_batch import DaytonaSandbox, QuotaExceeded, batch
from rlm_batch.tasks.capacity.admission import Admission
from rlm_batch.tasks.capacity.slots import Slots
from rlm_batch.tasks.lane import Lane

pytestmark = pytest.mark.anyio

NAP = "import time; time.sleep(0.3); SUBMIT(y=x)"


def inputs(count: int) -> list[dict[str, Any]]:
    return [{"x": x} for x in range(count)]


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_a_workspace_with_room_for_few_of_the_workers_finishes_the_job_and_no_execution_is_charged(
    daytona: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daytona.set(max_sandboxes=5)
    results = await batch(
        NAP, inputs(40), provider="daytona", max_workers=40, retries=0, reuse_sandboxes=True, timeout=60
    )
    assert [(result.y, result.meta.attempt) for result in results] == [(x, 1) for x in range(40)]
    state = daytona.state()
    assert state["peak"] == 5
    assert 0 < state["counts"]["POST /api/sandbox"] - state["created"] < 40
    assert sum("opens no more sandboxes for now" in text for text in caplog.messages) == 1


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_a_refusal_holds_all_workers_back_for_the_time_that_the_provider_asks_for(daytona: Any) -> None:
    daytona.set(minute=3.0, creates_per_minute=20)
    results = await batch(NAP, inputs(50), provider="daytona", max_workers=30, retries=0)
    assert [(result.y, result.meta.attempt) for result in results] == [(x, 1) for x in range(50)]
    state = daytona.state()
    assert state["created"] == 50
    assert 0 < state["counts"]["POST /api/sandbox"] - 50 <= 40  # two or three waits, a few refused at each


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_a_run_that_is_stopped_while_it_opens_its_sandboxes_leaves_none_and_opens_no_more(daytona: Any) -> None:
    daytona.set(boot_s=0.5)
    flow = asyncio.create_task(batch(NAP, inputs(100), provider="daytona", max_workers=100))
    for _ in range(600):
        if daytona.state()["created"] >= 12:
            break
        await asyncio.sleep(0.05)
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    created = daytona.state()["created"]
    assert created < 100
    await asyncio.sleep(0.5)
    assert daytona.state()["created"] == created  # the fixture sees that none is left


async def take_descriptors(taken: list[int]) -> None:
    """Opens files until no more can be, and again: others of this process may close some meanwhile."""
    while True:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_a_process_that_can_open_no_more_connections_is_told_what_to_do(daytona: Any) -> None:
    import daytona as _sdk  # its import opens files too

    assert _sdk.AsyncDaytona
    block = DaytonaSandbox()
    slots = Slots(block, Admission(), logging.getLogger("slots"))
    lane = Lane(block, "a run", reuse=True, timeout=20, slots=slots)
    await lane.acquire_for_work()
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 5, before[1]))
    taking = asyncio.create_task(take_descriptors(taken))
    try:
        await asyncio.sleep(0)  # until it has taken what there was
        with pytest.raises(QuotaExceeded, match="ulimit -n"):
            await lane.open_sandbox()
    finally:
        taking.cancel()
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await lane.acquire_for_work()
    assert (await lane.open_sandbox()).is_alive
    await lane.release()
