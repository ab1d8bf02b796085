"""The snapshot of a set-up: made once, used by later sandboxes and processes, and never a reason to fail."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, batch, reap
from rlm_batch.blocks.daytona import snapshots
from rlm_batch.blocks.daytona.provider import DaytonaProvider
from rlm_batch.cli.snapshot import print_snapshots, remove_snapshots

from ...infra.waiting import wait_until_async
from ...standins.git_server import GitServer

pytestmark = pytest.mark.anyio

CLONE = "POST /toolbox/*/process/execute"
CAPTURE = "POST /api/sandbox/*/snapshot"
READ_FILES = """
from pathlib import Path

import wheel_one

SUBMIT(setup=(Path.home() / "setup").read_text(), cloned=Path(".git").exists(), package=wheel_one.NAME)
"""


@pytest.fixture(autouse=True)
def forget_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin like a new process, which has not looked for a snapshot."""
    snapshots._environments.clear()
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))


async def run(provider: DaytonaProvider, code: str = "SUBMIT(x=1)", times: int = 4) -> list[Any]:
    """Run code in new sandboxes at the same time, and return the results."""

    async def run_one() -> Any:
        async with provider.interpreter() as interpreter:
            return await interpreter.execute(code)

    return await asyncio.gather(*(run_one() for _ in range(times)))


@pytest.mark.requires("pip")
async def test_the_set_up_happens_once_for_all_sandboxes_and_for_the_next_process(
    standin: Any, repository: GitServer
) -> None:
    settings: dict[str, Any] = {
        "setup": "echo -n done >> $HOME/setup",
        "repo_url": repository.url,
        "packages": [repository.add_wheel("wheel_one")],
        "setup_snapshot": "always",
    }
    results = await run(DaytonaSandbox(**settings), READ_FILES, 6)
    assert [result.outputs for result in results] == [{"setup": "done", "cloned": True, "package": "wheel_one"}] * 6
    snapshots._environments.clear()
    await run(DaytonaSandbox(**settings), READ_FILES, 2)
    state = standin.state()
    assert (state["counts"][CLONE], state["counts"][CAPTURE], len(state["snapshots"])) == (1, 1, 1)
    assert state["created"] == 8
    assert repository.downloads == {"clone": 1, "wheel": 1}
    snapshots._environments.clear()
    settings["setup"] = "echo -n other > $HOME/setup"
    await run(DaytonaSandbox(**settings), times=1)
    assert standin.state()["counts"][CAPTURE] == 2


async def test_uploaded_modules_are_not_part_of_the_snapshot(
    standin: Any, repository: GitServer, tmp_path: Path
) -> None:
    module = tmp_path / "modules" / "own_module.py"
    module.parent.mkdir()
    for number in (1, 2):
        module.write_text(f"NUMBER = {number}")
        provider = DaytonaSandbox(repo_url=repository.url, setup_snapshot="always").with_files([str(module.parent)])
        (result,) = await run(provider, "import own_module\nSUBMIT(number=own_module.NUMBER)", 1)
        assert result.outputs == {"number": number}
    assert standin.state()["counts"][CAPTURE] == 1


async def test_auto_keeps_a_slow_set_up_of_a_run_with_many_sandboxes(
    standin: Any, repository: GitServer, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"repo_url": repository.url}
    await batch(["SUBMIT(x=1)"] * 4, provider="daytona", provider_options=options)
    assert CAPTURE not in standin.state()["counts"]  # The set-up was fast.
    snapshots._environments.clear()
    monkeypatch.setattr(snapshots, "MIN_SETUP_SECONDS", 0.0)
    await batch(["SUBMIT(x=1)"] * 3, provider="daytona", provider_options=options)
    assert CAPTURE not in standin.state()["counts"]  # The run needed only three sandboxes.
    standin.reset()
    await batch([f"SUBMIT(x={number})" for number in range(8)], provider="daytona", provider_options=options)
    state = standin.state()
    assert (state["counts"][CLONE], state["counts"][CAPTURE], state["created"]) == (1, 1, 8)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_snapshots": 0}, "Snapshot quota exceeded"),
        ({"capture_fails": True}, "the capture failed"),
        (
            {"fault_rate": 1.0, "faults": ["403"], "fault_where": "/api/snapshots", "fault_message": "no right"},
            "no right",
        ),
    ],
    ids=["quota", "silent failure", "no right"],
)
async def test_without_a_snapshot_every_sandbox_is_set_up_and_one_line_says_why(
    standin: Any, repository: GitServer, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
) -> None:
    standin.set(**settings)
    with caplog.at_level(logging.WARNING, "rlm_batch.daytona"):
        await run(DaytonaSandbox(repo_url=repository.url, setup_snapshot="always"))
    (line,) = [record.getMessage() for record in caplog.records if "keeps no snapshot" in record.getMessage()]
    assert reason in line
    assert standin.state()["counts"][CLONE] == 4


@pytest.mark.parametrize("is_new_process", [False, True])
@pytest.mark.parametrize("change", [None, "inactive"])
async def test_a_snapshot_that_was_deleted_or_deactivated_costs_only_a_set_up(
    standin: Any, repository: GitServer, change: str | None, *, is_new_process: bool
) -> None:
    provider = DaytonaSandbox(repo_url=repository.url, setup_snapshot="always")
    await run(provider, times=2)
    (snapshot,) = standin.state()["snapshots"]
    if change is None:
        await provider.delete_snapshot(snapshot["id"])
    else:
        standin.set(snapshot_changes={snapshot["name"]: {"state": change}})
    if is_new_process:
        snapshots._environments.clear()
    await run(provider, times=1)
    await run(provider, times=2)
    expected = 2 if is_new_process else 3  # In the same process, the first sandbox afterwards was set up by itself.
    assert standin.state()["counts"][CLONE] == expected
    assert [snapshot["state"] for snapshot in standin.state()["snapshots"]] == ["active"]


async def test_a_failed_set_up_is_not_kept_and_says_why(standin: Any) -> None:
    provider = DaytonaSandbox(setup="echo the reason >&2; exit 3", setup_snapshot="always")
    with pytest.raises(ConfigurationError, match=r"`setup` failed with status 3: correct it\n.*the reason"):
        await run(provider, times=1)
    assert (standin.state()["snapshots"], standin.state()["sandboxes"]) == ([], [])


async def test_if_a_sandbox_dies_during_its_set_up_the_next_one_is_set_up_and_kept(
    standin: Any, repository: GitServer, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(repository.delays, "clone", 3600.0)
    options = {"repo_url": repository.url, "setup_snapshot": "always"}
    codes = [f"SUBMIT(x={number})" for number in range(4)]
    running = asyncio.create_task(batch(codes, provider="daytona", provider_options=options))
    await wait_until_async(lambda: repository.downloads["clone"], "the clone has begun")
    repository.delays.clear()
    (sandbox,) = standin.state()["sandboxes"]
    await DaytonaSandbox().delete_sandbox(sandbox["id"])
    assert [result.x for result in await running] == [0, 1, 2, 3]
    state = standin.state()
    assert (state["counts"][CAPTURE], len(state["snapshots"]), state["created"]) == (1, 1, 5)
    await wait_until_async(lambda: not standin.state()["sandboxes"], "no sandbox is left")


@pytest.mark.requires("pip")
@pytest.mark.parametrize("moment", ["clone", "wheel", "capture"])
async def test_a_set_up_that_is_cancelled_leaves_no_sandbox_and_is_made_again(
    standin: Any, repository: GitServer, wait_for_call: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    packages = [repository.add_wheel("wheel_one")]
    provider = DaytonaSandbox(repo_url=repository.url, packages=packages, setup_snapshot="always")
    if moment == "capture":
        standin.set(capture_s=3600.0, keeps_pending=False)
    else:
        monkeypatch.setitem(repository.delays, moment, 3600.0)
    opening = asyncio.create_task(run(provider, times=2))
    if moment == "capture":
        await wait_for_call(CAPTURE)
    else:
        await wait_until_async(lambda: repository.downloads[moment], "the download has begun")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await wait_until_async(lambda: not standin.state()["sandboxes"], "no sandbox is left")
    if moment == "capture":
        return  # The stand-in goes on with the capture, as Daytona does.
    assert standin.state()["snapshots"] == []
    repository.delays.clear()
    await run(provider, times=2)
    assert [snapshot["state"] for snapshot in standin.state()["snapshots"]] == ["active"]


async def test_commands_show_and_delete_the_set_ups_and_reap_the_unused_ones(
    standin: Any, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        await run(DaytonaSandbox(setup=f"echo {number}", setup_snapshot="always"), times=1)
    old, kept = (snapshot["name"] for snapshot in standin.state()["snapshots"])
    standin.set(snapshot_changes={old: {"last_used": "2020-01-01T00:00:00+00:00"}})
    assert await asyncio.to_thread(print_snapshots, provider="daytona") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [kept, old]
    assert (rows[1][1], rows[1][4], rows[1][6]) == ("0.5", "2020-01-01", "2020-01-08")
    with pytest.raises(ConfigurationError, match=r"made no snapshot 'other': see rlm-batch snapshot list"):
        await asyncio.to_thread(remove_snapshots, old, "other", provider="daytona")
    await reap("daytona", dry_run=True)
    assert len(standin.state()["snapshots"]) == 2
    await reap("daytona")
    assert [snapshot["name"] for snapshot in standin.state()["snapshots"]] == [kept]
    await asyncio.to_thread(remove_snapshots, kept, provider="daytona")
    assert standin.state()["snapshots"] == []
    with pytest.raises(ConfigurationError, match="the provider modal has no snapshots: daytona has"):
        await asyncio.to_thread(print_snapshots, provider="modal")


async def test_a_key_without_rights_for_snapshots_still_reaps(standin: Any, server: str) -> None:
    block = DaytonaSandbox()
    await block.open({**block.labels(""), "rlm-batch-expires": "1"})
    standin.set(fault_rate=1.0, faults=["403"], fault_where="/api/snapshots", fault_message="no right")
    assert len(await reap("daytona")) == 1
