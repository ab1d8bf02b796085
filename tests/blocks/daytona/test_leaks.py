"""Whatever happens to the host or to a call, no sandbox of Daytona's is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, OutcomeUnknown, QuotaExceeded, SandboxLost, SandboxStartError
from rlm_batch.blocks.daytona import deletion, errors, handle

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]


@pytest.fixture(autouse=True)
def standin(running_daytona: object, daytona: Any) -> Any:
    """Every test here has one, which was there before processes are counted."""
    return daytona


async def gone(standin: Any, looks: int = 100) -> bool:
    """Whether it has nothing any more: removing is accepted, and done a little later."""
    for _ in range(looks):
        if not standin.state()["sandboxes"]:
            return True
        await asyncio.sleep(0.05)
    return False


async def opened(provider: DaytonaSandbox) -> Any:
    return await provider.open(provider.labels("a run"))


async def test_name_labels_and_lifetime_are_in_the_call_that_creates(standin: Any) -> None:
    provider = DaytonaSandbox(lifetime=90, environment={"TOKEN": "secret of the code"})  # type: ignore[dict-item]
    begun = time.time()
    async with provider.interpreter(run="a run") as interpreter:
        (box,) = standin.state()["sandboxes"]
        assert box["name"].startswith("rlm-batch-")
        labels = box["labels"]
        assert labels["managed-by"] == "rlm-batch"
        assert labels["rlm-batch-run"] == "a run"
        assert labels["rlm-batch-host"] == os.uname().nodename
        assert begun + 89 <= float(labels["rlm-batch-expires"]) <= time.time() + 91
        assert box["body"]["ttlMinutes"] == 2
        assert box["body"]["autoDeleteInterval"] == 0
        assert box["body"]["autoStopInterval"] > 0
        # A warm sandbox serves only who asks for nothing of their own: the code has its environment from the driver.
        assert not box["body"]["env"]
        assert not box["body"]["volumes"]
        result = await interpreter.execute("import os; SUBMIT(token=os.environ['TOKEN'])")
        assert result.token == "secret of the code"
    assert await gone(standin)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.2, 0.45, 0.6])
async def test_a_cancelled_creation_leaves_nothing(standin: Any, after: float) -> None:
    standin.set(boot_s=0.3, fault_rate=1.0, faults=["delay"], fault_delay_s=0.2, fault_where=r"^POST /api/sandbox$")
    await DaytonaSandbox().check()  # the first client of a process takes seconds
    opening = asyncio.create_task(opened(DaytonaSandbox()))
    await asyncio.sleep(after)
    opening.cancel()
    (outcome,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(outcome, asyncio.CancelledError):
        await outcome.remove()  # type: ignore[union-attr]
    assert await gone(standin)
    await asyncio.sleep(0.5)
    assert await gone(standin)
    state = standin.state()
    assert state["created"] == state["destroyed"]


@pytest.mark.parametrize(
    ("boot_s", "delete_seconds", "tries"),
    [(3.0, 12.0, 5), pytest.param(15.0, 60.0, 7, marks=[pytest.mark.full, pytest.mark.timeout(120)])],
)
async def test_cold_starts_that_are_cancelled_are_removed_when_they_can_be_and_whoever_waits_is_told(
    standin: Any,
    boot_s: float,
    delete_seconds: float,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Daytona removes none that is starting: 409. The first case has all its times divided by five."""
    monkeypatch.setattr(deletion, "DELETE_SECONDS", delete_seconds)
    monkeypatch.setattr(errors, "TRIES", tries)
    await DaytonaSandbox().check()
    standin.set(boot_s=boot_s)
    opening = [asyncio.create_task(opened(DaytonaSandbox())) for _ in range(3)]
    while len(standin.state()["sandboxes"]) < 3:
        assert not any(task.done() for task in opening)
        await asyncio.sleep(0.01)
    for task in opening:
        task.cancel()
    outcomes = await asyncio.gather(*opening, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await gone(standin)
    assert standin.state()["created"] == 3
    records = [record for record in caplog.records if record.name.startswith("rlm_batch")]
    assert [record.getMessage() for record in records if record.levelname == "WARNING"] == [
        "3 sandboxes are still starting; removing them"
    ]


async def test_a_cancelled_creation_whose_answer_is_long_in_coming_is_waited_for_and_removed(
    standin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await DaytonaSandbox().check()
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=1.5, fault_where=r"^POST /api/sandbox$")
    opening = asyncio.create_task(opened(DaytonaSandbox()))
    await asyncio.sleep(0.2)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert standin.state()["created"] == 1
    assert await gone(standin)
    assert "1 sandbox is still starting; removing it" in caplog.text


async def test_a_removal_that_is_repeated_while_the_first_is_under_way_is_done(standin: Any) -> None:
    standin.set(destroy_s=4.0)
    provider = DaytonaSandbox()
    box = await opened(provider)
    await provider.delete_sandbox(box.id)
    await box.remove()
    assert standin.state()["sandboxes"]  # it is not waited for
    assert await gone(standin)


async def test_a_creation_that_takes_too_long_leaves_nothing(standin: Any) -> None:
    standin.set(boot_s=2.0)
    with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
        await opened(DaytonaSandbox(start_timeout=1))
    assert await gone(standin)
    assert standin.state()["created"] == 1


@pytest.mark.parametrize(
    "fault", ["drop", *(pytest.param(fault, marks=pytest.mark.full) for fault in ("502", "503")), "429"]
)
async def test_a_creation_whose_answer_is_lost_is_found_again_or_leaves_nothing(standin: Any, fault: str) -> None:
    for seed in range(4):  # half of the dropped calls are done, and half are not
        standin.set(
            fault_rate=1.0, faults=[fault], fault_times=1, fault_where=r"^POST /api/sandbox$", seed=seed,
            retry_after_s=0.1, boot_s=0.1,
        )  # fmt: skip
        (outcome,) = await asyncio.gather(opened(DaytonaSandbox()), return_exceptions=True)
        if isinstance(outcome, BaseException):
            assert fault == "429"
            assert type(outcome) is QuotaExceeded
        else:
            await outcome.remove()
        assert await gone(standin)
    state = standin.state()
    assert state["created"] == state["destroyed"] <= 4


async def test_a_start_that_cannot_be_seen_for_a_while_is_waited_for(standin: Any) -> None:
    standin.set(boot_s=0.5, fault_rate=1.0, faults=["502"], fault_times=2, fault_where=r"^GET /api/sandbox/\*$")
    box = await opened(DaytonaSandbox())
    await box.remove()
    assert standin.state()["created"] == 1


async def test_a_sandbox_that_ends_in_an_error_is_an_error_at_once_and_is_removed(standin: Any) -> None:
    standin.set(broken_snapshots=["broken"], boot_s=0.1)
    begun = time.monotonic()
    with pytest.raises(SandboxStartError, match="the runner could not start it"):
        await opened(DaytonaSandbox(snapshot="broken"))
    assert time.monotonic() - begun < 30
    assert await gone(standin)
    assert standin.state()["created"] == 1


async def test_a_failed_set_up_leaves_nothing(standin: Any) -> None:
    with pytest.raises(ConfigurationError, match="pip could not install"):
        await opened(DaytonaSandbox(packages=["/nowhere/at-all-1.0-py3-none-any.whl"]))
    assert await gone(standin)
    assert standin.state()["created"] == 1


async def test_a_driver_that_cannot_start_leaves_nothing_and_says_why(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.set(fault_rate=1.0, faults=["502"], fault_where=r"^POST .*/exec$")
    monkeypatch.setattr(errors, "TRIES", 2)
    with pytest.raises(SandboxStartError, match="did not start"):
        await DaytonaSandbox(start_timeout=1).interpreter().start()
    assert await gone(standin)


async def test_a_driver_whose_start_was_done_and_its_answer_lost_is_started_once_more_in_the_same_sandbox(
    standin: Any,
) -> None:
    standin.set(fault_rate=1.0, faults=["lost"], fault_times=2, fault_where=r"^POST .*/exec$")
    async with DaytonaSandbox().interpreter(timeout=30) as interpreter:
        assert (await interpreter.execute("SUBMIT(fine=1)")).fine
    assert standin.state()["created"] == 1
    assert await gone(standin)


async def test_a_removal_that_fails_for_a_while_is_done(standin: Any) -> None:
    box = await opened(DaytonaSandbox())
    standin.set(fault_rate=1.0, faults=["503"], fault_times=3, fault_where=r"^DELETE")
    await box.remove()
    assert await gone(standin)


async def test_a_removal_that_cannot_be_done_is_no_error_and_is_left_to_the_lifetime(
    standin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)
    monkeypatch.setattr(deletion, "DELETE_SECONDS", 0.3)
    standin.set(minute=0.5)
    box = await opened(DaytonaSandbox(lifetime=120))
    standin.set(minute=0.5, fault_rate=1.0, faults=["503"], fault_where=r"^DELETE")
    await box.remove()
    assert "could not be removed within" in caplog.text
    assert "at the end of its lifetime" in caplog.text
    assert await gone(standin)


async def test_a_cancelled_removal_is_done_nonetheless(standin: Any) -> None:
    interpreter = DaytonaSandbox().interpreter()
    await interpreter.start()
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=0.3, fault_where=r"^DELETE")
    closing = asyncio.create_task(interpreter.shutdown())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert await gone(standin)


async def test_removing_what_has_gone_is_success(standin: Any) -> None:
    provider = DaytonaSandbox()
    box = await opened(provider)
    await provider.delete_sandbox(box.id)
    assert await gone(standin)
    await provider.delete_sandbox(box.id)
    await provider.delete_sandbox("none of that id")
    await box.remove()


async def test_every_page_of_a_listing_is_read_and_others_sandboxes_are_not_in_it(standin: Any) -> None:
    from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams

    standin.set(page=3)
    provider = DaytonaSandbox()
    boxes = [await opened(provider) for _ in range(7)]
    async with AsyncDaytona() as sdk:
        other = await sdk.create(CreateSandboxFromSnapshotParams(name="somebody else's", labels={"managed-by": "them"}))
        listed = await provider.list_sandboxes()
        assert {info.id for info in listed} == {box.id for box in boxes}
        assert all(info.labels["rlm-batch-run"] == "a run" and info.expires > time.time() for info in listed)
        for info in listed:
            await provider.delete_sandbox(info.id)
        await asyncio.sleep(0.2)
        assert [box["name"] for box in standin.state()["sandboxes"]] == ["somebody else's"]
        await other.delete()
    for box in boxes:
        await box.remove()


async def test_a_sandbox_that_is_being_destroyed_is_not_listed_again(standin: Any) -> None:
    standin.set(destroy_s=3.0)
    provider = DaytonaSandbox()
    first, second = await opened(provider), await opened(provider)
    await provider.delete_sandbox(first.id)
    listed = await provider.list_sandboxes()
    assert len(standin.state()["sandboxes"]) == 2
    assert [info.id for info in listed] == [second.id]
    await second.remove()
    await first.remove()
    assert await gone(standin)


@pytest.mark.parametrize("destroy_s", [0.0, pytest.param(0.5, marks=pytest.mark.full)])
@pytest.mark.parametrize("when", ["starting", "installing", "cloning"])
async def test_a_sandbox_that_goes_away_while_it_is_set_up_is_tried_again_and_no_fault_of_the_settings(
    standin: Any, when: str, destroy_s: float
) -> None:
    call = {"starting": "POST /api/sandbox", "installing": "/exec", "cloning": "/git/clone"}[when]
    fields: dict[str, Any] = {"snapshot": "daytona-small"}
    standin.set(destroy_s=destroy_s)
    if when == "starting":
        standin.set(boot_s=3.0, keeps_pending=False)
    elif when == "installing":
        fields["packages"] = ["six"]
    else:
        standin.set(fault_rate=1.0, fault_where=call, faults=["delay"], fault_delay_s=1.0)
        fields |= {"repo_url": "https://127.0.0.1:1/code.git", "repo_ref": "0" * 40}
    opening = asyncio.ensure_future(opened(DaytonaSandbox(**fields)))
    state = standin.state()
    while not (state["sandboxes"] and any(call in name for name in state["counts"])):
        assert not opening.done()
        await asyncio.sleep(0.01)
        state = standin.state()
    await DaytonaSandbox().delete_sandbox(state["sandboxes"][0]["id"])
    with pytest.raises(SandboxStartError, match="it went away meanwhile"):
        await opening
    assert await gone(standin)


async def test_a_sandbox_that_goes_away_while_code_runs_leaves_its_outcome_unknown(standin: Any) -> None:
    provider = DaytonaSandbox()
    async with provider.interpreter(timeout=60) as interpreter:
        is_running = asyncio.Event()
        code = "print('on', flush=True)\nimport time; time.sleep(60)"
        running = asyncio.create_task(interpreter.execute(code, on_output=lambda *_: is_running.set()))
        async with asyncio.timeout(20):
            await is_running.wait()
        (info,) = await provider.list_sandboxes()
        await provider.delete_sandbox(info.id)
        with pytest.raises(OutcomeUnknown, match="idempotent"):
            await running
        assert not interpreter.is_alive
        with pytest.raises(SandboxLost):
            await interpreter.execute("SUBMIT(1)")


async def test_shutdown_ends_an_execution_whose_variables_are_being_uploaded(standin: Any) -> None:
    interpreter = DaytonaSandbox().interpreter(timeout=60)
    await interpreter.execute("pass")
    standin.set(fault_rate=1.0, faults=["delay"], fault_delay_s=20.0, fault_where="bulk-upload")
    running = asyncio.create_task(interpreter.execute("SUBMIT()", {"text": "x" * 100_000}))
    while "POST /toolbox/*/files/bulk-upload" not in standin.state()["counts"]:
        assert not running.done()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(15):
        await interpreter.shutdown()
        with pytest.raises(SandboxLost, match="it was shut down"):
            await running


@pytest.mark.full
async def test_an_idle_sandbox_is_kept_while_its_code_runs(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Five of the provider's minutes are a second and a half here; a beat comes every 15 s.
    standin.set(minute=0.3)
    monkeypatch.setattr(handle, "KEEP_AWAKE_SECONDS", 0.4)
    async with DaytonaSandbox(lifetime=86_400).interpreter(timeout=30) as interpreter:
        assert (await interpreter.execute("import time; time.sleep(3.5); SUBMIT(fine=1)")).fine
    assert standin.state()["counts"]["POST /api/sandbox/*/last-activity"] > 3


@pytest.mark.parametrize("unknown", [["ttlMinutes"], ["ttlMinutes", "autoStopInterval", "autoDeleteInterval"]])
async def test_where_daytona_knows_no_lifetime_a_sandbox_that_nobody_calls_is_stopped_and_deleted(
    standin: Any, unknown: list[str]
) -> None:
    """As with an older one, which drops the fields of a creation that it does not know."""
    standin.set(unknown_fields=unknown, minute=0.2)  # 5 minutes without a call are a second here
    await opened(DaytonaSandbox(lifetime=60))
    (box,) = standin.state()["sandboxes"]
    assert box["autoDestroyAt"] is None
    assert (box["autoStopInterval"], box["autoDeleteInterval"]) == (5, 0)
    assert await gone(standin)


async def test_where_daytona_knows_a_lifetime_nothing_is_set_once_more(standin: Any) -> None:
    box = await opened(DaytonaSandbox())
    assert standin.state()["counts"] == {"POST /api/sandbox": 1}
    assert standin.state()["sandboxes"][0]["autoDestroyAt"] is not None
    await box.remove()


@pytest.mark.full
async def test_where_daytona_knows_no_lifetime_the_host_keeps_no_sandbox_awake_beyond_it(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "KEEP_AWAKE_SECONDS", 0.2)
    standin.set(unknown_fields=["ttlMinutes"], minute=0.2)
    interpreter = DaytonaSandbox(lifetime=5).interpreter()
    await interpreter.start()
    await asyncio.sleep(1.2)
    assert standin.state()["sandboxes"]
    assert await gone(standin, 200)
    await interpreter.shutdown()


async def test_a_start_that_is_queued_is_given_up_by_daytona_when_we_give_it_up(standin: Any) -> None:
    box = await opened(DaytonaSandbox(start_timeout=90))
    assert standin.state()["sandboxes"][0]["body"]["queueTimeout"] == 2
    await box.remove()


HOST = """
    import asyncio, sys
    from rlm_batch import DaytonaSandbox

    async def one(provider):
        interpreter = provider.interpreter(run="killed", timeout=600)
        await interpreter.start()
        print("open", flush=True)
        await interpreter.execute("import time; time.sleep(600)")

    async def main():
        provider = DaytonaSandbox(lifetime=120)
        await asyncio.gather(*(one(provider) for _ in range(20)))

    asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_what_a_killed_host_had_open_can_be_found_and_is_gone_with_its_lifetime(standin: Any) -> None:
    standin.set(minute=30.0, boot_s=0.09)  # 120 s of lifetime are two minutes, 60 s here
    host = subprocess.Popen([sys.executable, "-c", dedent(HOST)], stdout=subprocess.PIPE)
    assert host.stdout is not None
    try:
        for _ in range(20):
            assert host.stdout.readline() == b"open\n"
        host.send_signal(signal.SIGKILL)
        host.wait()
    finally:
        host.kill()
        host.stdout.close()
    listed = asyncio.run(DaytonaSandbox().list_sandboxes())
    assert len(listed) == 20
    assert {info.labels["rlm-batch-run"] for info in listed} == {"killed"}
    assert len({info.id for info in listed}) == 20
    until = time.monotonic() + 90
    while standin.state()["sandboxes"] and time.monotonic() < until:
        time.sleep(0.2)
    assert standin.state()["sandboxes"] == []
    assert standin.state()["destroyed"] == 20


@pytest.mark.full
def test_a_script_that_ends_without_shutting_down_is_not_held_up(standin: Any) -> None:
    standin.set(minute=1.0)
    code = "from rlm_batch import DaytonaInterpreter\nDaytonaInterpreter(lifetime=360).execute('x = 1')\nprint('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr
    until = time.monotonic() + 10
    while standin.state()["sandboxes"] and time.monotonic() < until:
        time.sleep(0.1)
    assert standin.state()["sandboxes"] == []
