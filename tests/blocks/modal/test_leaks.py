"""Removal of unused Modal sandboxes, even after their host has died."""

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

from ...infra.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]
HOUR = 3600.0  # seconds; longer than any test, so a delay ends only when the test replaces the rules


def find_sandboxes(standin: Any) -> dict[str, Any]:
    return standin.ask("state")["sandboxes"]


def check_nothing_remains(standin: Any) -> None:
    state = standin.ask("state")
    assert [state[name] for name in ("sandboxes", "commands", "folders")] == [{}, [], []]


async def wait_for_call(standin: Any, call: str, times: int) -> None:
    await wait_until_async(lambda: standin.ask("state")["counts"].get(call, 0) >= times, f"{times} times {call}")


async def open_and_remove(block: ModalSandbox) -> None:
    """Open and remove a sandbox, so that the next opening does not look up the app, image and client again."""
    await (await block.open(block.labels(""))).remove()


async def test_a_sandbox_is_created_with_labels_name_and_limits(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox(lifetime=100)
    labels = block.labels("run-1")
    sandbox = await block.open(labels)
    record = find_sandboxes(modal_standin)[sandbox.id]
    assert record["tags"] == labels
    assert record["name"].startswith("rlm-batch-")
    assert (record["timeout"], record["idle_timeout"]) == (100, 60)
    assert not modal_standin.ask("state")["counts"].get("SandboxTagsSetV2")
    await sandbox.remove()
    check_nothing_remains(modal_standin)


async def test_cancelled_creations_are_awaited_and_deleted_and_the_log_warns(
    modal_sandbox: Make, modal_standin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    block = modal_sandbox()
    await open_and_remove(block)
    modal_standin.ask("reset")
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "delay": HOUR, "times": 3}])
    opening = [asyncio.create_task(block.open(block.labels(""))) for _ in range(6)]
    await wait_for_call(modal_standin, "SandboxCreateV2", 6)
    await wait_until_async(lambda: len(find_sandboxes(modal_standin)) == 3, "three are open")
    await wait_until_async(lambda: sum(task.done() for task in opening) == 3, "three are heard of")
    for task in opening:
        task.cancel()
    warning = "removing a sandbox that is still starting"
    await wait_until_async(lambda: warning in caplog.text, "the log warns")
    modal_standin.ask("faults", rules=[])
    ends = await asyncio.gather(*opening, return_exceptions=True)
    opened = [end for end in ends if not isinstance(end, BaseException)]
    assert len(opened) == 3
    assert set(find_sandboxes(modal_standin)) == {sandbox.id for sandbox in opened}
    assert modal_standin.ask("state")["peak"] > 3
    await asyncio.gather(*(sandbox.remove() for sandbox in opened))
    assert not find_sandboxes(modal_standin)
    assert [record.getMessage() for record in caplog.records if record.name == "rlm_batch.modal"] == [warning] * 3


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
async def test_a_sandbox_is_found_by_name_after_its_creations_answer_is_lost(
    modal_sandbox: Make, modal_standin: Any, rules: list[dict[str, Any]]
) -> None:
    block = modal_sandbox()
    await block.check()
    modal_standin.ask("faults", rules=rules)
    async with block.interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(x=1)")).x == 1
    state = modal_standin.ask("state")
    assert state["peak"] == 1  # All attempts of the client carry the same key.
    assert state["counts"]["SandboxGetFromNameV2"] == 1
    assert not state["sandboxes"]


async def test_a_creation_that_fails_or_times_out_is_an_error(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    await open_and_remove(block)
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "status": "UNAVAILABLE"}])
    with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
        await block.open(block.labels(""))
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "status": "RESOURCE_EXHAUSTED"}])
    with pytest.raises(QuotaExceeded):
        await block.open(block.labels(""))
    modal_standin.ask("faults", rules=[{"method": "SandboxCreateV2", "delay": HOUR}])
    block.start_timeout = 1
    with pytest.raises(SandboxStartError, match=r"within 1 s: raise `start_timeout`"):
        await block.open(block.labels(""))


async def test_a_driver_that_does_not_start_leaves_no_sandbox(modal_sandbox: Make, modal_standin: Any) -> None:
    modal_standin.ask("faults", rules=[{"method": "TaskExecStart", "status": "INVALID_ARGUMENT"}])
    with pytest.raises(Exception, match="did not start"):
        async with modal_sandbox().interpreter():
            pass
    assert not find_sandboxes(modal_standin)


async def test_a_failed_deletion_is_retried(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox()
    sandbox = await block.open(block.labels(""))
    rules = [{"method": "SandboxTerminateV2", "status": "RESOURCE_EXHAUSTED", "times": 2}]
    modal_standin.ask("faults", rules=rules)
    await sandbox.remove()
    assert not find_sandboxes(modal_standin)
    await sandbox.remove()


async def test_sandboxes_are_listed_by_label_and_deleted_by_id(modal_sandbox: Make, modal_standin: Any) -> None:
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
    assert set(find_sandboxes(modal_standin)) == {elsewhere.id}
    await elsewhere.remove()
    await block.delete_sandbox("sb-00000000000000000000000000000000")
    await asyncio.gather(*(sandbox.remove() for sandbox in opened))


# A host that opens sandboxes, runs endless code in them, and prints that the code runs.
HOST = """
import asyncio
from functools import partial
from rlm_batch import ModalSandbox
from rlm_batch.blocks import cloud_sandbox

cloud_sandbox.DriverSettings = partial(cloud_sandbox.DriverSettings, silence=15, heartbeat=1)

async def main():
    block = ModalSandbox(lifetime=3600, idle_timeout=60)
    interpreters = [block.interpreter(tools={"begin": lambda: print("on", flush=True)}) for _ in range(3)]
    await asyncio.gather(*(one.execute("begin()\\nwhile True: pass") for one in interpreters))

asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.parametrize("end", ["lifetime", "idle timeout"])
def test_sandboxes_of_a_killed_host_end_by_lifetime_or_idle_timeout(
    end: str, modal_sandbox: Make, modal_standin: Any
) -> None:
    hello = modal_standin.hello
    environment = {**os.environ, "MODAL_TOKEN_ID": hello["token_id"], "MODAL_TOKEN_SECRET": hello["token_secret"]}
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, env=environment) as host:
        assert host.stdout is not None
        try:
            for _ in range(3):
                assert host.stdout.readline() == "on\n"
        finally:
            host.send_signal(signal.SIGKILL)
    if end == "idle timeout":
        wait_until(lambda: not modal_standin.ask("state")["commands"], "the drivers have ended themselves")
    assert len(find_sandboxes(modal_standin)) == 3
    modal_standin.ask("age", seconds=3600 if end == "lifetime" else 60)
    wait_until(lambda: not find_sandboxes(modal_standin), "no sandbox is left")
    check_nothing_remains(modal_standin)
