"""The limits of a saved block hold over processes, on either database; what a dead holder held comes back."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import DaytonaSandbox
from rlm_batch.deployments.server import PrefectServer

from ...infra.postgres import Postgres
from ...infra.prefect_database import make_prefect_home
from .test_limits import NAP, assert_rate

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PROGRAM = """
import asyncio, sys
from rlm_batch import batch

code, count, nap, workers = sys.argv[1:]
inputs = [{"nap": float(nap)}] * int(count)
run = batch(code, inputs=inputs, provider="daytona-sandbox/shared", max_workers=int(workers), timeout=60)
print(len(asyncio.run(run)))
"""


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.requires("postgres")), "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Prefect server on that database, which this process and those below use."""
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            url = stack.enter_context(Postgres()).url
            monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", url)
        else:
            make_prefect_home(tmp_path / "server")
        server = stack.enter_context(PrefectServer(tmp_path / "server"))
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        stack.enter_context(temporary_settings({PREFECT_API_URL: server.url}))
        yield request.param


@contextlib.contextmanager
def runs(*each: tuple[int, float, int]) -> Iterator[list[subprocess.Popen[str]]]:
    """A process with a batch each: so many executions, seconds for each, workers."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, NAP, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in each
    ]
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def finished(running: list[subprocess.Popen[str]], counts: list[int]) -> None:
    for process, count in zip(running, counts, strict=True):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        assert out.strip() == str(count)


def saved(**fields: Any) -> None:
    DaytonaSandbox(**fields).save("shared", overwrite=True)


async def slots_in_use() -> int:
    async with get_client() as client:
        limits = await client.read_global_concurrency_limits(limit=100)
        return sum(limit.active_slots for limit in limits if limit.name.startswith("rlm-batch."))


def usage(history: list[tuple[float, int]], most: int) -> float:
    """The share of the slots that was in use, from the first moment that all were to the last."""
    full = [moment for moment, count in history if count == most]
    spent, (before, count) = 0.0, (full[0], most)
    for moment, after in history:
        if full[0] < moment <= full[-1]:
            spent += (moment - before) * count
            before, count = moment, after
    return spent / ((full[-1] - full[0]) * most)


@pytest.mark.alone  # it measures a share of time
def test_three_processes_never_have_more_sandboxes_than_the_block_allows(database, daytona, record_property):
    saved(max_sandboxes=3)
    daytona.set(boot_s=0.05)
    with runs(*[(24, 1.5, 4)] * 3) as running:
        finished(running, [24] * 3)
    state = daytona.state()
    assert state["created"] == 72
    assert state["peak"] == 3
    share = usage([tuple(moment) for moment in state["history"]], 3)
    record_property("share", share)
    print(f"{database}: slots in use {share:.1%} of the time")
    assert share > (0.9 if database == "postgres" else 0.5)
    assert asyncio.run(slots_in_use()) == 0


@pytest.mark.alone  # a creation is seen when its call arrives, which a busy machine puts off
def test_two_processes_keep_to_one_rate_of_creations(database, daytona):
    saved(creations_per_second=5)
    daytona.set(boot_s=0.0)
    with runs(*[(30, 0.0, 8)] * 2) as running:
        finished(running, [30] * 2)
    assert_rate(daytona, 5, 60)


def test_the_slot_of_a_killed_process_comes_back_by_itself(database, daytona):
    saved(max_sandboxes=1, lifetime=60)
    with runs((1, 30, 1)) as (holder,):
        until = time.monotonic() + 60
        while daytona.state()["created"] < 1 and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(holder.pid, signal.SIGKILL)
        killed = time.monotonic()
        with runs((1, 0.0, 1)) as other:
            finished(other, [1])
    print(f"{database}: the slot came back after {time.monotonic() - killed:.0f} s")
    assert asyncio.run(slots_in_use()) == 0
    for box in daytona.state()["sandboxes"]:
        asyncio.run(DaytonaSandbox().delete_sandbox(box["id"]))
