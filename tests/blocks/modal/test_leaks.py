"""Sandboxes of Modal that nobody uses any more are gone, whatever became of their host."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import ModalSandbox, QuotaExceeded, SandboxStartError

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]

# A host that opens sandboxes, runs code that never ends in them, and says so.
HOST = """
import asyncio, sys
from dataclasses import replace
from rlm_batch import ModalSandbox
from rlm_batch.blocks.modal import handle

silence, lifetime, idle = (float(word) for word in sys.argv[1:])
usual = handle.make_driver_settings
handle.make_driver_settings = lambda settings: replace(usual(settings), silence=silence, heartbeat=silence / 4)

async def main():
    block = ModalSandbox(lifetime=int(lifetime), idle_timeout=int(idle))
    interpreters = [block.interpreter(timeout=None) for _ in range(3)]
    await asyncio.gather(*(one.start() for one in interpreters))
    print("open", flush=True)
    await asyncio.gather(*(one.execute("while True: pass") for one in interpreters))

asyncio.run(main())
"""


def sandboxes(standin: Any) -> dict[str, Any]:
    return standin.ask("state")["sandboxes"]


async def gone(standin: Any, seconds: float) -> bool:
    """Whether the stand-in has no sandbox left, within that time."""
    for _ in range(int(seconds / 0.05)):
        if not sandboxes(standin):
            break
        await asyncio.sleep(0.05)
    state = standin.ask("state")
    return not (state["sandboxes"] or state["commands"] or state["folders"])


async def test_a_sandbox_is_labelled_named_and_limited_from_the_first_moment(
    modal_sandbox: Make, modal_standin: Any
) -> None:
    block = modal_sandbox(lifetime=100)
    labels = block.labels("run-1")
    sandbox = await block.open(labels)
    try:
        found = sandboxes(modal_standin)[sandbox.id]
        assert found["tags"] == labels
        assert found["name"].startswith("rlm-batch-")
        assert found["timeout"] == 100
        assert found["idle_timeout"] == 60
        assert not modal_standin.ask("state")["counts"].get("SandboxTagsSetV2")
    finally:
        await sandbox.remove()
    assert await gone(modal_standin, 5)


async def test_a_sandbox_takes_four_calls_when_its_handles_are_there(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    async with block.interpreter():
        pass
    modal_standin.ask("reset")
    async with block.interpreter() as interpreter:
        await interpreter.execute("SUBMIT(1)")
    counts = modal_standin.ask("state")["counts"]
    # The driver and the first frame are one piece of input, and the code is another.
    assert counts == {
        "SandboxCreateV2": 1, "TaskExecStart": 1, "TaskExecStdinWrite": 2, "TaskExecStdioRead": 1,
        "SandboxTerminateV2": 1,
    }  # fmt: skip


@pytest.mark.parametrize("after", [0.0, 0.05, 0.2])
async def test_cancelling_twenty_creations_under_way_leaves_nothing(
    modal_sandbox: Make, modal_standin: Any, after: float
) -> None:
    block = modal_sandbox()
    async with block.interpreter():
        pass
    rules = [
        {"method": "SandboxCreateV2", "delay": 0.1, "probability": 0.5},
        {"method": "SandboxCreateV2", "delay": 0.5},
    ]
    modal_standin.ask("faults", rules=rules)
    opening = [asyncio.create_task(block.open(block.labels(""))) for _ in range(20)]
    await asyncio.sleep(after)
    for task in opening:
        task.cancel()
    ends = await asyncio.gather(*opening, return_exceptions=True)
    opened = [end for end in ends if not isinstance(end, BaseException)]
    await asyncio.gather(*(sandbox.remove() for sandbox in opened))
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    assert not sandboxes(modal_standin)


async def test_cold_starts_that_are_cancelled_are_waited_for_and_removed_and_whoever_waits_is_told(
    modal_sandbox: Make, modal_standin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    block = modal_sandbox()
    await (await block.open(block.labels(""))).remove()
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "delay": 2.0}])

    def count_creations() -> int:
        return modal_standin.ask("state")["counts"]["SandboxCreateV2"]

    before = count_creations()
    opening = [asyncio.create_task(block.open(block.labels(""))) for _ in range(3)]
    while count_creations() < before + 3:
        assert not any(task.done() for task in opening)
        await asyncio.sleep(0.02)
    for task in opening:
        task.cancel()
    await asyncio.gather(*opening, return_exceptions=True)
    assert modal_standin.ask("state")["peak"] > 1
    assert not sandboxes(modal_standin)
    assert [record.getMessage() for record in caplog.records if record.name == "rlm_batch.modal"] == [
        "3 sandboxes are still starting; removing them"
    ]


async def test_cancelling_twenty_interpreters_that_start_leaves_nothing(
    modal_sandbox: Make, modal_standin: Any
) -> None:
    block = modal_sandbox()
    modal_standin.ask("set", boot_delay=0.3)
    starting = [asyncio.create_task(block.interpreter().start()) for _ in range(20)]
    await asyncio.sleep(0.3)
    for task in starting:
        task.cancel()
    await asyncio.gather(*starting, return_exceptions=True)
    assert not sandboxes(modal_standin)


@pytest.mark.parametrize(
    "rules",
    [
        [{"method": "SandboxCreateV2", "status": "UNAVAILABLE", "after": True}],
        [
            {"method": "SandboxCreateV2", "status": "UNAVAILABLE", "after": True, "times": 1},
            {"method": "SandboxCreateV2", "status": "RESOURCE_EXHAUSTED"},
        ],
    ],
    ids=["never answered", "refused after an answer was lost"],
)
async def test_a_sandbox_whose_creations_answer_was_lost_is_found_by_its_name_and_used(
    modal_sandbox: Make, modal_standin: Any, rules: list[dict[str, Any]]
) -> None:
    block = modal_sandbox()
    await block.check()
    modal_standin.ask("faults", rules=rules)
    async with block.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(x=1)")).x == 1
    state = modal_standin.ask("state")
    assert state["peak"] == 1  # the client's own attempts carry one key
    assert state["counts"]["SandboxGetFromNameV2"] == 1
    assert not state["sandboxes"]


async def test_a_creation_that_made_nothing_is_an_error(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    await block.check()
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "status": "UNAVAILABLE"}])
    with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
        await block.open(block.labels(""))
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "status": "RESOURCE_EXHAUSTED"}])
    with pytest.raises(QuotaExceeded):
        await block.open(block.labels(""))


async def test_a_creation_that_takes_longer_than_the_blocks_start_timeout_is_an_error(
    modal_sandbox: Make, modal_standin: Any
) -> None:
    block = modal_sandbox()
    await (await block.open(block.labels(""))).remove()
    block = modal_sandbox(start_timeout=1)
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "delay": 3.0}])
    with pytest.raises(SandboxStartError, match=r"within 1 s \(start_timeout\)"):
        await block.open(block.labels(""))


async def test_a_removal_that_fails_at_first_is_made_again(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    sandbox = await block.open(block.labels(""))
    rules = [{"method": "SandboxTerminateV2", "status": "RESOURCE_EXHAUSTED", "times": 3}]
    modal_standin.ask("faults", rules=rules)
    await sandbox.remove()
    assert not sandboxes(modal_standin)
    await sandbox.remove()


async def test_a_driver_that_does_not_start_leaves_no_sandbox(modal_sandbox: Make, modal_standin: Any) -> None:
    modal_standin.ask("faults", rules=[{"method": "TaskExecStart", "status": "INVALID_ARGUMENT"}])
    with pytest.raises(Exception, match="did not start"):
        async with modal_sandbox().interpreter():
            pass
    assert not sandboxes(modal_standin)


async def test_sandboxes_are_listed_by_label_and_removed_by_id(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    opened = await asyncio.gather(*(block.open(block.labels(f"run-{number}")) for number in range(3)))
    other = modal_sandbox(app_name="another-app")
    elsewhere = await other.open(other.labels("run-9"))
    listed = {info.id: info for info in await block.list_sandboxes()}
    assert set(listed) == {sandbox.id for sandbox in opened}
    assert {info.labels["rlm-batch-run"] for info in listed.values()} == {"run-0", "run-1", "run-2"}
    assert all(info.expires > time.time() for info in listed.values())
    for sandbox in opened:
        await block.delete_sandbox(sandbox.id)
        await block.delete_sandbox(sandbox.id)
    assert await block.list_sandboxes() == []
    assert set(sandboxes(modal_standin)) == {elsewhere.id}
    await elsewhere.remove()
    await block.delete_sandbox("sb-00000000000000000000000000000000")
    await asyncio.gather(*(sandbox.remove() for sandbox in opened))


def killed_host(standin: Any, *words: str) -> float:
    """Starts the host, kills it when its code runs, and tells when that was."""
    environment = {
        **os.environ, "MODAL_TOKEN_ID": standin.hello["token_id"], "MODAL_TOKEN_SECRET": standin.hello["token_secret"]
    }  # fmt: skip
    host = subprocess.Popen([sys.executable, "-c", HOST, *words], stdout=subprocess.PIPE, text=True, env=environment)
    assert host.stdout is not None
    assert host.stdout.readline() == "open\n"
    until = time.monotonic() + 10
    while len(standin.ask("state")["commands"]) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(sandboxes(standin)) == 3
    os.kill(host.pid, signal.SIGKILL)
    host.wait()
    host.stdout.close()
    return time.monotonic()


@pytest.mark.full
async def test_a_host_that_is_killed_leaves_nothing_after_the_lifetime(modal_sandbox: Make, modal_standin: Any) -> None:
    killed_host(modal_standin, "90", "10", "60")
    assert sandboxes(modal_standin)
    assert await gone(modal_standin, 20)


@pytest.mark.full
async def test_a_host_that_is_killed_leaves_nothing_after_its_silence_and_the_idle_timeout(
    modal_sandbox: Make, modal_standin: Any
) -> None:
    killed_host(modal_standin, "6", "3600", "4")
    assert sandboxes(modal_standin)
    assert await gone(modal_standin, 40)


@pytest.mark.full
async def test_a_driver_that_is_busy_keeps_its_sandbox_from_being_idle(modal_sandbox: Make) -> None:
    async with modal_sandbox(idle_timeout=4).interpreter() as interpreter:
        assert (await interpreter.execute("import time; time.sleep(6); SUBMIT(x=1)")).x == 1
        await asyncio.sleep(5)
        assert (await interpreter.execute("SUBMIT(x=2)")).x == 2
