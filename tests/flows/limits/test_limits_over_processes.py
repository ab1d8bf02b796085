"""Limits of a saved block over several processes, on each database; a dead process's slots are released."""

import asyncio
import contextlib
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
from rlm_batch.flows.server.process import ServerProcess

from ...infra.postgres import Postgres
from ...infra.prefect_database import make_prefect_home
from ...infra.waiting import wait_until
from .test_limits import NAP

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PROGRAM = """
import asyncio, sys
from rlm_batch import batch

code, count, nap, workers = sys.argv[1:]
inputs = [{"nap": float(nap)}] * int(count)
run = batch(code, inputs=inputs, provider="rlm-daytona-sandbox/shared", max_workers=int(workers), timeout=1000)
print(len(asyncio.run(run)))
"""


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.requires("postgres")), "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a Prefect server on the database; this process and its children use it."""
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            url = stack.enter_context(Postgres()).url
            monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", url)
        else:
            make_prefect_home(tmp_path / "server")
        server = stack.enter_context(ServerProcess.start(tmp_path / "server"))
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        stack.enter_context(temporary_settings({PREFECT_API_URL: server.url}))
        yield request.param


@contextlib.contextmanager
def start_batches(*each: tuple[int, float, int]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one process per batch, with its number of executions, seconds for each, and workers."""
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


def wait_for_batches(running: list[subprocess.Popen[str]], counts: list[int]) -> None:
    for process, count in zip(running, counts, strict=True):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        assert out.strip() == str(count)


def save_block(**fields: Any) -> None:
    DaytonaSandbox(**fields).save("shared", overwrite=True)


async def slots_in_use() -> int:
    async with get_client() as client:
        limits = await client.read_global_concurrency_limits(limit=100)
        return sum(limit.active_slots for limit in limits if limit.name.startswith("rlm-batch."))


def test_three_processes_share_the_blocks_sandbox_and_creation_limits(database, daytona):
    save_block(max_sandboxes=3, creations_per_second=5)
    began = time.monotonic()
    with start_batches(*[(8, 0.3, 4)] * 3) as running:
        wait_for_batches(running, [8] * 3)
    state = daytona.state()
    assert state["created"] == 24
    assert state["peak"] <= 3
    assert time.monotonic() - began >= (24 - 2) / 5  # the first two are created at once
    assert asyncio.run(slots_in_use()) == 0


def test_the_slot_of_a_killed_process_is_released_automatically(database, daytona):
    save_block(max_sandboxes=1, lifetime=60)
    with start_batches((1, 1000, 1)) as (holder,):
        wait_until(lambda: daytona.state()["created"])
        holder.kill()
        with start_batches((1, 0.0, 1)) as other:
            wait_for_batches(other, [1])
    assert asyncio.run(slots_in_use()) == 0
    for box in daytona.state()["sandboxes"]:
        asyncio.run(DaytonaSandbox().delete_sandbox(box["id"]))
