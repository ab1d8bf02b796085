"""Volumes on Modal: what an execution saved is there for the next, and why."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlm_batch import CodeError, ModalSandbox, VolumeError
from rlm_batch.blocks.modal import handle

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]

SAVE = "open(f'/data/{name}', 'w').write(text)\nSUBMIT(saved=name)"
READ = "import os\nSUBMIT(files={name: open('/data/' + name).read() for name in sorted(os.listdir('/data'))})"


@pytest.fixture
def volume() -> str:
    """A volume of the test's own."""
    return f"volume-{uuid.uuid4().hex[:8]}"


def causes(standin: Any, cause: str, volume: str) -> list[list[str]]:
    """The files of each commit of a volume that had that cause."""
    events = standin.ask("state")["events"]
    return [event["files"] for event in events if (event["cause"], event["volume"]) == (cause, volume)]


async def test_a_later_sandbox_reads_what_an_earlier_one_saved(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    modal_standin.ask("set", commit_at_end=False)  # so that only a commit of ours can make it so
    block = modal_sandbox(volume_name=volume)
    async with block.interpreter() as one:
        await one.execute(SAVE, {"name": "a.txt", "text": "of the first"})
        # Before the first sandbox has ended, and as soon as its result is known.
        assert modal_standin.ask("volume", name=volume) == {"a.txt": "of the first"}
    async with block.interpreter() as other:
        assert (await other.execute(READ)).files == {"a.txt": "of the first"}
    assert causes(modal_standin, "sync", volume)[0] == ["a.txt"]
    assert not causes(modal_standin, "end", volume)


async def test_without_the_commit_a_later_sandbox_would_read_nothing(
    modal_sandbox: Make, modal_standin: Any, volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modal_standin.ask("set", commit_at_end=False)
    usual = handle.make_driver_settings
    monkeypatch.setattr(handle, "make_driver_settings", lambda settings: replace(usual(settings), commit=[]))
    block = modal_sandbox(volume_name=volume)
    async with block.interpreter() as one:
        await one.execute(SAVE, {"name": "a.txt", "text": "lost"})
    async with block.interpreter() as other:
        assert (await other.execute(READ)).files == {}


async def test_a_sandbox_that_is_open_already_reads_what_another_saved(modal_sandbox: Make, volume: str) -> None:
    block = modal_sandbox(volume_name=volume)
    async with block.interpreter() as one, block.interpreter() as other:
        assert (await other.execute(READ)).files == {}
        await one.execute(SAVE, {"name": "a.txt", "text": "of the first"})
        await other.execute(SAVE, {"name": "b.txt", "text": "of the other"})
        both = {"a.txt": "of the first", "b.txt": "of the other"}
        assert (await other.execute(READ)).files == both
        assert (await one.execute(READ)).files == both
        await one.execute("import os\nos.remove('/data/b.txt')")
        assert (await other.execute(READ)).files == {"a.txt": "of the first"}


async def test_code_that_failed_has_its_files_committed_too(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    async with modal_sandbox(volume_name=volume).interpreter() as one:
        with pytest.raises(CodeError):
            await one.execute("open('/data/log.txt', 'w').write('so far'); 1 / 0")
        assert modal_standin.ask("volume", name=volume) == {"log.txt": "so far"}


async def test_a_commit_that_fails_is_an_error_and_no_result(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    async with modal_sandbox(volume_name=volume).interpreter() as one:
        modal_standin.ask("set", commit_error="no space left on the volume")
        with pytest.raises(VolumeError, match="could not be committed: sync: no space left on the volume"):
            await one.execute(SAVE, {"name": "a.txt", "text": "x"})
        modal_standin.ask("set", commit_error="")
        await one.execute(SAVE, {"name": "b.txt", "text": "y"})


@pytest.mark.full
async def test_twenty_chunks_at_once_save_each_its_own_file(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    block = modal_sandbox(volume_name=volume)

    async def save(number: int) -> None:
        async with block.interpreter() as one:
            await one.execute(SAVE, {"name": f"{number}.txt", "text": str(number)})

    await asyncio.gather(*(save(number) for number in range(20)))
    expected = {f"{number}.txt": str(number) for number in range(20)}
    assert modal_standin.ask("volume", name=volume) == expected
    async with block.interpreter() as one:
        assert (await one.execute(READ)).files == expected


async def test_a_file_that_is_held_open_keeps_others_out_and_stops_nothing(
    modal_sandbox: Make, volume: str, caplog: pytest.LogCaptureFixture
) -> None:
    block = modal_sandbox(volume_name=volume)
    async with block.interpreter() as one, block.interpreter() as other:
        await one.execute("log = open('/data/log.txt', 'w'); log.write('x'); log.flush()", context="main")
        await other.execute(SAVE, {"name": "a.txt", "text": "y"})
        assert (await one.execute("import os\nSUBMIT(files=os.listdir('/data'))", context="main")).files == ["log.txt"]
        assert "could not reload its volume" in caplog.text
        await one.execute("log.close()", context="main")
        assert (await one.execute(READ)).files == {"a.txt": "y", "log.txt": "x"}


async def test_a_volume_may_be_mounted_anywhere(modal_sandbox: Make, modal_standin: Any, volume: str) -> None:
    block = modal_sandbox(volume_name=volume, volume_mount_path="/mnt/shared")
    async with block.interpreter() as one:
        await one.execute("open('/mnt/shared/a.txt', 'w').write('x')")
    assert modal_standin.ask("volume", name=volume) == {"a.txt": "x"}


async def test_files_go_in_and_out(modal_sandbox: Make, modal_standin: Any, volume: str) -> None:
    block = modal_sandbox(volume_name=volume)
    sandbox = await block.open(block.labels(""))
    try:
        data = bytes(range(256)) * 40_000  # 10 MB
        await sandbox.upload("deep/er/a.bin", data)
        assert await sandbox.download("deep/er/a.bin") == data
        assert await sandbox.download("/sandbox/deep/er/a.bin") == data
        await sandbox.upload("/data/b.bin", b"for all")
        for path in ("../a", "no/such/file", "deep"):
            with pytest.raises(VolumeError, match=path.split("/")[0]):
                await sandbox.download(path)
        with pytest.raises(VolumeError, match="could not be written"):
            await sandbox.upload("deep", b"")
    finally:
        await sandbox.remove()
    assert modal_standin.ask("volume", name=volume) == {"b.bin": "for all"}
