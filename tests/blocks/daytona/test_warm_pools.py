"""Warm pools: made for a run, claimed by its sandboxes, never larger than what it needs, and gone at its end."""

import asyncio
import logging
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daytona as sdk
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from rlm_batch import ConfigurationError, DaytonaSandbox, ExecutionsFailed, batch, chunks, reap
from rlm_batch.blocks.daytona import environment
from rlm_batch.cli.doctor import run_doctor
from rlm_batch.cli.snapshot import print_snapshots
from rlm_batch.flows.child_process import build_module_command
from rlm_batch.flows.orphans import remove_sandboxes

from ...infra.waiting import wait_until, wait_until_async

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("server")]

MAKE, UPDATE, CREATE = "POST /api/warm-pools", "PATCH /api/warm-pools/*", "POST /api/sandbox"
OPTIONS: dict[str, Any] = {"setup": "true", "warm_pool": 50}


@pytest.fixture(autouse=True)
def forget_environments(standin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test begin like a new process, and fail a test that leaves a pool."""
    environment._environments.clear()
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    yield
    assert standin.state()["warm_pools"] == []


def read_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rlm_batch.daytona"]


def find_sizes(standin: Any) -> list[int]:
    return [pool["pool"] for pool in standin.state()["warm_pools"]]


async def make_pool(standin: Any, size: int = 2) -> str:
    """Keep a set-up, make a pool of its snapshot as another process would, and return the snapshot's name."""
    async with DaytonaSandbox(setup="true", setup_snapshot="always").interpreter():
        (snapshot,) = standin.state()["snapshots"]
    async with sdk.AsyncDaytona() as client:
        await client.warm_pool.create(snapshot["name"], size)
    return snapshot["name"]


async def test_a_run_claims_warm_sandboxes_and_keeps_no_more_than_it_has_to_open(standin: Any) -> None:
    sizes: list[list[int]] = []

    async def look(number: int) -> None:
        expected = [[], [2], [1], [0]][number]  # The first sandbox makes the snapshot, the second one the pool.
        await wait_until_async(lambda: find_sizes(standin) == expected, f"the pool has the size {expected}")
        sizes.append(expected)

    options = {**OPTIONS, "environment": {"NAME": "value"}}
    code = "import os; look(number=number); SUBMIT(name=os.environ['NAME'])"
    inputs = [{"number": number} for number in range(4)]
    results = await batch(
        code, inputs=inputs, tools={"look": look}, provider="daytona", provider_options=options, max_workers=1
    )
    assert [result.name for result in results] == ["value"] * 4
    assert sizes == [[], [2], [1], [0]]
    state = standin.state()
    assert (state["counts"][MAKE], state["counts"][CREATE]) == (1, 4)
    assert state["claimed"] >= 2


async def test_a_resumed_run_keeps_none_warm_for_results_that_it_has(standin: Any, tmp_path: Path) -> None:
    async def look(number: int) -> None:
        if number >= 2:
            await wait_until_async(lambda: find_sizes(standin) == [[1], [0]][number - 2], "the pool has the right size")

    for count in (2, 4):
        await batch(
            "look(number=number); SUBMIT()", inputs=[{"number": number} for number in range(count)], max_workers=1,
            tools={"look": look}, provider="daytona", provider_options=OPTIONS, results_path=str(tmp_path / "ledger"),
        )  # fmt: skip
    assert standin.state()["counts"][CREATE] == 4


@pytest.mark.parametrize("end", ["failed", "cancelled", pytest.param("deadline", marks=pytest.mark.full)])
async def test_a_run_that_does_not_succeed_deletes_its_pool_too(standin: Any, end: str) -> None:
    code = "raise ValueError" if end == "failed" else "import time; time.sleep(3600 if number else 0)"
    running = asyncio.create_task(
        batch(
            code, inputs=[{"number": number} for number in range(4)], provider="daytona", provider_options=OPTIONS,
            max_workers=1, deadline=20 if end == "deadline" else None, timeout=3600,
        )
    )  # fmt: skip
    if end == "cancelled":
        await wait_until_async(lambda: find_sizes(standin), "the pool is made")
        running.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else ExecutionsFailed):
        await running
    assert standin.state()["warm_pools"] == []
    assert standin.state()["counts"][MAKE] == 1


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, id="Ctrl-C"), pytest.param(signal.SIGKILL, id="kill -9")]
)
def test_a_command_deletes_its_pool_and_reap_does_so_for_a_killed_one(
    standin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(3600 if x else 0)")
    (tmp_path / "rows.csv").write_text("x\n0\n1\n2\n3\n")
    command = [
        *build_module_command("rlm_batch.cli.main", "batch", "slow.py"), "--inputs", "rows.csv", "--setup", "true",
        "--provider", "daytona", "--warm-pool", "2", "--max-workers", "1", "--timeout", "3600",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(lambda: find_sizes(standin) or process.poll() is not None, "the pool is made")
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=150)
    if number == signal.SIGINT:
        assert (process.returncode, standin.state()["warm_pools"]) == (130, []), errors
        return
    caplog.set_level(logging.INFO)
    reap.sync("daytona", dry_run=True)
    assert find_sizes(standin), errors
    assert len(reap.sync("daytona")) == 1
    lines = [line for line in map(logging.LogRecord.getMessage, caplog.records) if line.startswith("warm pool of")]
    assert ["would be deleted" in line for line in lines] == [True, False]
    assert "no run uses it, " in lines[1]


async def test_a_pool_stays_while_another_run_uses_it(standin: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlm_batch.daytona")
    is_first_over = asyncio.Event()

    async def wait(number: int) -> None:
        if number:
            await asyncio.wait_for(is_first_over.wait(), 150)

    def start(code: str, **options: Any) -> asyncio.Task[Any]:
        inputs = [{"number": number} for number in range(3)]
        tools = {"wait": wait}
        return asyncio.create_task(
            batch(code, inputs=inputs, tools=tools, provider="daytona", provider_options=OPTIONS, max_workers=1)
        )

    second = start("wait(number=number); SUBMIT()")
    await wait_until_async(lambda: find_sizes(standin), "the pool is made")
    await start("SUBMIT(number=number)")
    assert len(find_sizes(standin)) == 1
    assert any("stays, because another run uses it" in line for line in read_warnings(caplog))
    assert len(await reap("daytona")) == 0
    assert len(find_sizes(standin)) == 1
    is_first_over.set()
    await second
    assert standin.state()["counts"][MAKE] == 2  # The other call was refused, without a line in the log.


@pytest.mark.parametrize("process", ["the parent of shards", "the worker of a killed run"])
async def test_another_process_deletes_the_pool_that_a_run_has_left(standin: Any, process: str) -> None:
    await make_pool(standin)
    await DaytonaSandbox(setup="false", warm_pool=1).end_run("with another set-up")
    assert find_sizes(standin) == [2]
    async with DaytonaSandbox(setup="true").interpreter():  # It does not use the pool, and so would not delete it.
        if process == "the parent of shards":
            await DaytonaSandbox(setup="true", warm_pool=1).end_run("the job")
        else:
            parameters = {"provider": "daytona", "provider_options": OPTIONS}
            await remove_sandboxes(batch, FlowRun(flow_id=uuid.uuid4(), parameters=parameters), Crashed())
    assert find_sizes(standin) == []


async def test_a_pool_that_could_not_be_deleted_is_named(standin: Any, caplog: pytest.LogCaptureFixture) -> None:
    await make_pool(standin)
    standin.set(fault_rate=1.0, faults=["400"], fault_where="DELETE /api/warm-pools", fault_message="not now")
    await DaytonaSandbox(setup="true", warm_pool=1).end_run("the job")
    (line,) = read_warnings(caplog)
    assert "a warm pool may be left, which costs money: run rlm-batch reap --provider daytona" in line
    assert "not now" in line
    standin.set(fault_rate=0.0)
    await reap("daytona")


FORBIDDEN = {"fault_rate": 1.0, "faults": ["403"], "fault_where": "/api/warm-pools", "fault_message": "no right"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"warm_pools": False}, "Warm pools are not available"),
        ({"max_sandboxes": 2}, "Warm pool quota exceeded"),
        (FORBIDDEN, "no right"),
    ],
    ids=["no pools", "quota", "no right"],
)
async def test_a_run_without_a_pool_says_so_in_one_line(
    standin: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
) -> None:
    standin.set(**settings)
    codes = [f"SUBMIT(x={number})" for number in range(6)]
    results = await batch(codes, provider="daytona", provider_options=OPTIONS, max_workers=1)
    assert [result.x for result in results] == [0, 1, 2, 3, 4, 5]
    (line,) = [line for line in read_warnings(caplog) if "warm pool" in line]
    assert "continues without a warm pool: " in line
    assert reason in line
    assert standin.state()["counts"][MAKE] == 1


async def test_a_pool_that_uses_up_the_quota_is_emptied(standin: Any, caplog: pytest.LogCaptureFixture) -> None:
    standin.set(max_sandboxes=3, boot_s=3600.0)

    def boot() -> None:
        standin.set(boot_s=0.0)

    first = asyncio.create_task(
        batch(["SUBMIT()"] * 2, provider="daytona", provider_options={"setup": "true", "setup_snapshot": "always"})
    )
    await wait_until_async(lambda: standin.state()["created"], "the first sandbox starts")
    boot()
    await first
    await wait_until_async(lambda: not standin.state()["sandboxes"], "no sandbox is left")
    standin.set(boot_s=3600.0)
    options = {**OPTIONS, "warm_pool": 3}
    codes = [f"import time; SUBMIT(x={number})" for number in range(8)]
    running = asyncio.create_task(batch(codes, provider="daytona", provider_options=options, max_workers=4))
    await wait_until_async(lambda: find_sizes(standin) == [0], "the pool is emptied")
    boot()
    assert [result.x for result in await running] == [*range(8)]
    (line,) = [line for line in read_warnings(caplog) if "warm pool" in line]
    assert line == "the account's quota is used up, so the run empties its warm pool: lower warm_pool"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warm_pool": 2}, "warm_pool needs a set-up, whose snapshot the sandboxes start from: set setup or packages"),
        ({**OPTIONS, "setup_snapshot": "never"}, "warm_pool needs the snapshot of the set-up: leave setup_snapshot"),
        ({**OPTIONS, "warm_pool": 0}, "warm_pool is 0: it should be greater than or equal to 1"),
    ],
    ids=["no set-up", "no snapshot", "none"],
)
async def test_a_pool_that_cannot_work_is_one_sentence_before_any_call(
    standin: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        await batch(["SUBMIT()"], provider="daytona", provider_options=options)
    with pytest.raises(ConfigurationError, match="its sandboxes have no volume: leave volume_name out, or warm_pool"):
        await chunks(
            "SUBMIT()", data=[1], chunk_size=1, provider="daytona", provider_options=OPTIONS, volume_name="results"
        )
    assert standin.state()["counts"] == {}


async def test_commands_show_the_pools_because_they_cost_money(
    standin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.set(max_sandboxes=3)
    name = await make_pool(standin, 3)
    await wait_until_async(lambda: not standin.state()["warm_pools"][0]["errorReason"], "the pool is full")
    standin.set(max_sandboxes=2)
    async with sdk.AsyncDaytona() as client:
        (pool,) = await client.warm_pool.list()
        await client.warm_pool.update(pool.id, 4)
    await asyncio.to_thread(print_snapshots, "daytona")
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.startswith(name)
    assert "3 of 4 (Total disk limit exceeded. Maximum allowed: 6GiB.) in local" in row
    await asyncio.to_thread(run_doctor)
    assert "warm sandboxes, which cost money: 3 of 4 (Total disk" in " ".join(capsys.readouterr().out.split())
    await DaytonaSandbox().delete_warm_pool(pool.id)
    await DaytonaSandbox().delete_warm_pool(pool.id)


async def test_a_pool_goes_with_its_snapshot(standin: Any) -> None:
    await make_pool(standin)
    (snapshot,) = standin.state()["snapshots"]
    await DaytonaSandbox().delete_snapshot(snapshot["id"])
    assert await DaytonaSandbox().list_warm_pools() == []
