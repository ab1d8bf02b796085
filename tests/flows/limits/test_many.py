"""Runs with many workers: they adapt to their provider's capacity, and end cleanly whenever they are stopped."""

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, LocalSandbox, QuotaExceeded, batch
from rlm_batch.flows.engine.lane import Lane
from rlm_batch.flows.engine.run import Run
from rlm_batch.flows.parameters import Options
from rlm_batch.flows.plan import Plan
from rlm_batch.tasks.capacity.admission import Admission
from rlm_batch.tasks.capacity.slots import Slots
from rlm_batch.tasks.execution import Execution

from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

CODE = "SUBMIT(y=x)"


def inputs(count: int) -> list[dict[str, Any]]:
    return [{"x": x} for x in range(count)]


@pytest.mark.full
async def test_a_small_workspace_finishes_the_job_without_using_up_retries(
    daytona: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daytona.set(max_sandboxes=5)
    results = await batch(CODE, inputs(40), provider="daytona", max_workers=40, retries=0, reuse_sandboxes=True)
    assert [(result.y, result.meta.attempt) for result in results] == [(x, 1) for x in range(40)]
    state = daytona.state()
    assert state["peak"] == 5
    assert state["counts"]["POST /api/sandbox"] > state["created"]
    assert sum("opens no more sandboxes for now" in text for text in caplog.messages) == 1


@pytest.mark.full
@pytest.mark.parametrize("reuse", [False, True])
async def test_checks_in_a_small_workspace_take_turns_with_executions(daytona: Any, reuse: bool) -> None:
    daytona.set(max_sandboxes=3)
    results = await batch(
        CODE, inputs(16), check="SUBMIT(passed=submitted['y'] == x)", provider="daytona", max_workers=6, retries=0,
        reuse_sandboxes=reuse,
    )  # fmt: skip
    assert [(result.passed, result.meta.attempt) for result in results] == [(True, 1)] * 16
    assert daytona.state()["peak"] == 3


@pytest.mark.full
async def test_stopping_a_run_while_sandboxes_open_leaves_no_sandbox(daytona: Any) -> None:
    daytona.set(boot_s=3600)
    flow = asyncio.create_task(batch(CODE, inputs(100), provider="daytona", max_workers=100))
    await wait_until_async(lambda: daytona.state()["created"] >= 12)
    flow.cancel()
    daytona.set(boot_s=0.0)  # Daytona does not remove a sandbox that is starting
    with pytest.raises(asyncio.CancelledError):
        await flow  # the fixture checks that no sandbox is left
    assert daytona.state()["created"] < 100


async def test_a_lack_of_descriptors_says_the_fix_whatever_error_it_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_files(*_: object) -> Any:
        raise ConfigurationError("the files cannot be read") from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("rlm_batch.blocks.local.provider.LocalProvider.open", read_files)
    block = LocalSandbox()
    slots = Slots(block, Admission(), logging.getLogger("slots"))
    slots.admission.has_opened_sandbox = True
    lane = Lane(Run(options=Options(), plan=Plan(total=1), provider=block, run_id="a run"), slots)
    with pytest.raises(QuotaExceeded, match="ulimit -n"):
        await lane.execute(Execution(0, "SUBMIT()", {}, "00" * 32))


async def take_descriptors(taken: list[int]) -> None:
    """Open files up to the limit, repeatedly, because other code of this process may close some."""
    while True:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        await asyncio.sleep(0.02)


@pytest.mark.full
async def test_a_process_without_free_connections_gets_an_error_with_the_fix(daytona: Any) -> None:
    import daytona as _sdk  # the import opens files too

    assert _sdk.AsyncDaytona
    block = DaytonaSandbox()
    slots = Slots(block, Admission(), logging.getLogger("slots"))
    run = Run(options=Options(reuse_sandboxes=True), plan=Plan(total=1), provider=block, run_id="a run")
    lane = Lane(run, slots)
    execution = Execution(0, "SUBMIT(x=1)", {}, "00" * 32)
    await lane.acquire_for_work()
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 5, before[1]))
    taking = asyncio.create_task(take_descriptors(taken))
    try:
        await asyncio.sleep(0)  # let it take the free descriptors
        with pytest.raises(QuotaExceeded, match="ulimit -n"):
            await lane.execute(execution)
    finally:
        taking.cancel()
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await lane.acquire_for_work()
    assert (await lane.execute(execution)).x == 1
    await lane.release()
