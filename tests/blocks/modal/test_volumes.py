"""Volumes on Modal: the next execution sees saved files, and each commit has the expected cause."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import CodeError, ModalSandbox, VolumeError

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]

SAVE = "open(f'/data/{name}', 'w').write(text)\nSUBMIT(saved=name)"
READ = "import os\nSUBMIT(files={name: open('/data/' + name).read() for name in sorted(os.listdir('/data'))})"


@pytest.fixture
def volume() -> str:
    """Return the name of a volume that no other test uses."""
    return f"volume-{uuid.uuid4().hex[:8]}"


def list_commits(standin: Any, cause: str, volume: str) -> list[list[str]]:
    """Return the files of each commit that a cause made on a volume."""
    events = standin.ask("state")["events"]
    return [event["files"] for event in events if (event["cause"], event["volume"]) == (cause, volume)]


async def test_files_are_saved_before_the_result_even_if_code_fails_at_any_mount_path(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    modal_standin.ask("set", commit_at_end=False)  # only the project's own commit can save the file
    async with modal_sandbox(volume_name=volume, volume_mount_path="/mnt/shared").interpreter() as one:
        with pytest.raises(CodeError):
            await one.execute("open('/mnt/shared/a.txt', 'w').write('so far'); 1 / 0")
        # The file is saved before the first sandbox ends, as soon as the result is known.
        assert modal_standin.ask("volume", name=volume) == {"a.txt": "so far"}
    async with modal_sandbox(volume_name=volume).interpreter() as other:
        assert (await other.execute(READ)).files == {"a.txt": "so far"}
    assert list_commits(modal_standin, "sync", volume)[0] == ["a.txt"]
    assert not list_commits(modal_standin, "end", volume)


async def test_an_open_sandbox_reads_files_that_another_saved(modal_sandbox: Make, volume: str) -> None:
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


async def test_a_failed_commit_is_an_error_instead_of_a_result(
    modal_sandbox: Make, modal_standin: Any, volume: str
) -> None:
    async with modal_sandbox(volume_name=volume).interpreter() as one:
        modal_standin.ask("set", commit_error="no space left on the volume")
        with pytest.raises(VolumeError, match=r"could not be committed, .*: sync: no space left on the volume"):
            await one.execute(SAVE, {"name": "a.txt", "text": "x"})
        modal_standin.ask("set", commit_error="")
        await one.execute(SAVE, {"name": "b.txt", "text": "y"})


async def test_an_open_file_delays_the_reload_of_the_volume_with_a_warning(
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
