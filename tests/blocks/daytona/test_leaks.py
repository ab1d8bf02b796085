"""Failures of hosts and calls. The fixture `daytona` checks that no sandbox is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import DaytonaSandbox, SandboxLost, SandboxStartError
from rlm_batch.blocks.daytona import account, channel, errors

from ...infra.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.anyio

CREATE, DELETE, START = "POST /api/sandbox", "DELETE /api/sandbox/*", "GET /api/sandbox/*"
HOUR = 3600.0  # seconds; longer than any test, so the wait ends only when the test ends it


async def open_sandbox(provider: DaytonaSandbox) -> Any:
    return await provider.open(provider.labels("a run"))


def delay(standin: Any, where: str) -> None:
    """Delay the calls that match `where` until `go_on`."""
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=HOUR, fault_where=where)


def go_on(standin: Any) -> None:
    """End all delays."""
    standin.set(fault_rate=0.0, fault_delay_s=0.0, boot_s=0.0, destroy_s=0.0)


async def wait_until_empty(standin: Any) -> None:
    await wait_until_async(lambda: not standin.state()["sandboxes"], "no sandbox is left")


async def test_the_creating_call_sends_name_labels_and_lifetime(standin: Any) -> None:
    provider = DaytonaSandbox(lifetime=90, start_timeout=90, environment={"TOKEN": "secret of the code"})  # type: ignore[dict-item]
    begun = time.time()
    async with provider.interpreter(run="a run") as interpreter:
        (box,) = standin.state()["sandboxes"]
        assert box["name"].startswith("rlm-batch-")
        labels = box["labels"]
        assert labels["managed-by"] == "rlm-batch"
        assert labels["rlm-batch-run"] == "a run"
        assert labels["rlm-batch-host"] == os.uname().nodename
        assert begun + 89 <= float(labels["rlm-batch-expires"]) <= time.time() + 91
        assert (box["body"]["ttlMinutes"], box["body"]["queueTimeout"], box["body"]["autoDeleteInterval"]) == (2, 2, 0)
        assert box["body"]["autoStopInterval"] == 5  # minutes
        # Daytona keeps warm sandboxes for creations without an environment, so the driver sets the code's environment.
        assert not box["body"]["env"]
        assert not box["body"]["volumes"]
        result = await interpreter.execute("import os; SUBMIT(token=os.environ['TOKEN'])")
        assert result.token == "secret of the code"


# -- creations


@pytest.mark.parametrize("moment", ["before its answer", "while it starts"])
async def test_cancelled_creations_are_deleted_when_possible_and_the_log_warns(
    moment: str, standin: Any, wait_for_call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Daytona refuses to remove a sandbox that is starting, with status 409."""
    if moment == "while it starts":
        standin.set(boot_s=HOUR)
    else:
        delay(standin, "^POST /api/sandbox$")
    opening = [asyncio.create_task(open_sandbox(DaytonaSandbox())) for _ in range(3)]
    if moment == "while it starts":
        await wait_until_async(lambda: len(standin.state()["sandboxes"]) == 3, "three sandboxes start")
    else:
        await wait_for_call(CREATE, 3)
    for task in opening:
        task.cancel()
    warning = "removing a sandbox that is still starting"
    await wait_until_async(lambda: warning in caplog.text, "the log warns")
    if moment == "while it starts":
        async with asyncio.timeout(60):  # before `start_timeout` ends the creations
            await wait_for_call(DELETE, 3)
    go_on(standin)
    outcomes = await asyncio.gather(*opening, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await wait_until_empty(standin)
    assert standin.state()["created"] == 3
    records = [record for record in caplog.records if record.name.startswith("rlm_batch")]
    assert [record.getMessage() for record in records if record.levelname == "WARNING"] == [warning] * 3


async def test_a_creation_that_times_out_leaves_no_sandbox(standin: Any, wait_for_call: Callable[..., Any]) -> None:
    standin.set(boot_s=HOUR)
    await DaytonaSandbox().check()  # The first client of a process takes seconds.
    opening = asyncio.create_task(open_sandbox(DaytonaSandbox(start_timeout=10)))
    await wait_for_call(DELETE)
    go_on(standin)
    with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
        await opening
    assert standin.state()["created"] == 1


async def test_a_creation_whose_answer_is_lost_is_found_again(standin: Any) -> None:
    standin.set(fault_rate=1.0, faults=["lost"], fault_times=1, fault_where="^POST /api/sandbox$")
    await (await open_sandbox(DaytonaSandbox())).remove()
    state = standin.state()
    assert (state["faults"], state["created"]) == ({"lost": 1}, 1)


async def test_a_sandbox_that_fails_to_start_raises_and_is_deleted(standin: Any) -> None:
    standin.set(broken_snapshots=["broken"])
    with pytest.raises(SandboxStartError, match="the runner could not start it"):
        await open_sandbox(DaytonaSandbox(snapshot="broken", start_timeout=3600))
    await wait_until_empty(standin)
    assert standin.state()["created"] == 1


@pytest.mark.parametrize("moment", ["starting", "installing", "cloning"])
async def test_losing_a_sandbox_during_setup_is_not_a_configuration_error(
    moment: str, standin: Any, wait_for_call: Callable[..., Any]
) -> None:
    fields: dict[str, Any] = {}
    if moment == "starting":
        standin.set(boot_s=HOUR, keeps_pending=False)
        call = START
    elif moment == "installing":
        delay(standin, "^GET .*/command/[^/]*$")
        fields["packages"] = ["six"]
        call = "GET /toolbox/*/process/session/*/command/*"
    else:
        delay(standin, "/process/execute")
        fields |= {"repo_url": "https://127.0.0.1:1/code.git", "repo_ref": "0" * 40}
        call = "POST /toolbox/*/process/execute"
    opening = asyncio.create_task(open_sandbox(DaytonaSandbox(**fields)))
    await wait_for_call(call)
    (box,) = standin.state()["sandboxes"]
    await DaytonaSandbox().delete_sandbox(box["id"])
    await wait_until_empty(standin)
    go_on(standin)
    with pytest.raises(SandboxStartError, match="disappeared meanwhile"):
        await opening
    assert standin.state()["created"] == 1


# -- removals


async def test_a_sandbox_being_destroyed_is_neither_awaited_nor_listed(standin: Any) -> None:
    standin.set(destroy_s=HOUR)
    provider = DaytonaSandbox()
    first, second = await open_sandbox(provider), await open_sandbox(provider)
    await provider.delete_sandbox(first.id)
    await first.remove()
    assert len(standin.state()["sandboxes"]) == 2
    assert [info.id for info in await provider.list_sandboxes()] == [second.id]
    go_on(standin)
    await second.remove()


async def test_a_cancelled_deletion_still_completes(standin: Any, wait_for_call: Callable[..., Any]) -> None:
    interpreter = DaytonaSandbox().interpreter()
    await interpreter.start()
    delay(standin, "^DELETE")
    closing = asyncio.create_task(interpreter.shutdown())
    await wait_for_call(DELETE)
    closing.cancel()
    await asyncio.sleep(0)
    go_on(standin)
    with pytest.raises(asyncio.CancelledError):
        await closing
    await wait_until_empty(standin)


async def test_a_failed_deletion_is_not_an_error_and_the_lifetime_ends_the_sandbox(
    standin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)
    monkeypatch.setattr(account, "DELETE_SECONDS", 0.3)
    sandbox = await open_sandbox(DaytonaSandbox(lifetime=120))
    standin.set(fault_rate=1.0, faults=["503"], fault_where=r"^DELETE")
    await sandbox.remove()
    assert "could not be removed within" in caplog.text
    assert "wait until Daytona removes it" in caplog.text
    standin.set(minute=0.01)
    await wait_until_empty(standin)


async def test_every_page_of_own_sandboxes_is_listed_and_deleting_twice_succeeds(
    standin: Any,
) -> None:
    from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams  # This import takes seconds.

    standin.set(page=3)
    provider = DaytonaSandbox()
    boxes = [await open_sandbox(provider) for _ in range(7)]
    async with AsyncDaytona() as sdk:
        other = await sdk.create(CreateSandboxFromSnapshotParams(name="somebody else's", labels={"managed-by": "them"}))
        listed = await provider.list_sandboxes()
        assert {info.id for info in listed} == {box.id for box in boxes}
        assert all(info.labels["rlm-batch-run"] == "a run" and info.expires > time.time() for info in listed)
        for info in listed:
            await provider.delete_sandbox(info.id)
        await wait_until_async(lambda: len(standin.state()["sandboxes"]) == 1, "ours are gone")
        assert [box["name"] for box in standin.state()["sandboxes"]] == ["somebody else's"]
        await other.delete()
    await provider.delete_sandbox(boxes[0].id)
    await provider.delete_sandbox("none of that id")
    for box in boxes:
        await box.remove()


# -- sandboxes in use


async def test_shutdown_ends_an_execution_during_its_upload(standin: Any, wait_for_call: Callable[..., Any]) -> None:
    interpreter = DaytonaSandbox().interpreter()
    await interpreter.execute("pass")
    delay(standin, "bulk-upload")
    running = asyncio.create_task(interpreter.execute("SUBMIT()", {"text": "x" * 100_000}))
    await wait_for_call("POST /toolbox/*/files/bulk-upload")
    async with asyncio.timeout(90):
        await interpreter.shutdown()
        with pytest.raises(SandboxLost, match="it was shut down"):
            await running


async def test_an_idle_sandbox_is_kept_awake_while_its_code_runs(
    standin: Any, wait_for_call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "KEEP_AWAKE_SECONDS", 0.1)
    tools = {"wait": lambda: wait_for_call("POST /api/sandbox/*/last-activity", 3)}
    async with DaytonaSandbox().interpreter(tools=tools) as interpreter:
        assert (await interpreter.execute("wait(); SUBMIT(fine=1)")).fine


# -- hosts that die


HOST = """
    import asyncio
    from rlm_batch import DaytonaSandbox

    async def use(provider):
        interpreter = provider.interpreter(run="killed")
        await interpreter.start()
        print("open", flush=True)
        await interpreter.execute("import time; time.sleep(1000)")

    async def main():
        provider = DaytonaSandbox(lifetime=120)
        await asyncio.gather(*(use(provider) for _ in range(5)))

    asyncio.run(main())
"""


@pytest.mark.full
def test_sandboxes_of_a_killed_host_are_listed_and_end_with_their_lifetime(standin: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", dedent(HOST)], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        try:
            for _ in range(5):
                assert host.stdout.readline() == b"open\n"
        finally:
            host.send_signal(signal.SIGKILL)
    listed = asyncio.run(DaytonaSandbox().list_sandboxes())
    assert len({info.id for info in listed}) == 5
    assert {info.labels["rlm-batch-run"] for info in listed} == {"killed"}
    standin.set(minute=0.01)
    wait_until(lambda: not standin.state()["sandboxes"], "no sandbox is left")
    assert standin.state()["destroyed"] == 5


@pytest.mark.full
def test_a_script_that_ends_without_shutdown_does_not_hang(standin: Any) -> None:
    code = "from rlm_batch import DaytonaInterpreter\nDaytonaInterpreter(lifetime=360).execute('x = 1')\nprint('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr
    standin.set(minute=0.01)
    wait_until(lambda: not standin.state()["sandboxes"], "no sandbox is left")
