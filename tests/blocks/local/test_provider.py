"""The local provider: its choice of a level, its errors, and its sandboxes and their folders."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from rlm_batch import ConfigurationError, LocalInterpreter, LocalSandbox, OutcomeUnknown, SandboxLost, VolumeError
from rlm_batch.blocks.local import creation, deletion, isolation_level
from rlm_batch.blocks.local import isolation as levels
from rlm_batch.blocks.local.isolation_level import resolve_level
from rlm_batch.sandbox.errors import RlmBatchError

from ...infra.isolation_levels import find_strongest_level
from ...infra.requirements import ORDINARY_UID
from .hosts import copy_python

if TYPE_CHECKING:
    from .boxes import Box, Boxes

pytestmark = pytest.mark.anyio


@pytest.fixture
def unknown_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Clear the cache of facts about this machine, and restore it after the test."""
    known = dict(isolation_level._reasons)
    isolation_level._reasons.clear()
    yield monkeypatch
    isolation_level._reasons.clear()
    isolation_level._reasons.update(known)


def put_bubblewrap(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put a script named `bwrap` on PATH, as its only program."""
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


# ------------------------------------------------------------------------------------------------------------ the level


@pytest.mark.requires("isolation")
async def test_auto_chooses_the_strongest_working_level() -> None:
    level = find_strongest_level()
    block = LocalSandbox()
    assert await resolve_level(block.isolation) == level
    assert (await block.check()).startswith(level)
    async with block.interpreter() as interpreter:
        meta = (await interpreter.execute("pass")).meta
    assert meta.isolation == level
    assert meta.layers
    assert "limits" in meta.layers


@pytest.mark.requires("landlock")
async def test_auto_chooses_landlock_where_bubblewrap_is_missing_or_fails(
    unknown_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unknown_machine.setenv("PATH", str(tmp_path))
    async with LocalSandbox().interpreter() as interpreter:
        result = await interpreter.execute("SUBMIT(works=True)")
    assert result.works
    assert result.meta.isolation == "landlock"
    assert {"seccomp", "limits"} < set(result.meta.layers)
    # bubblewrap is installed, but the kernel refuses to create namespaces, as in a container.
    isolation_level._reasons.clear()
    put_bubblewrap(unknown_machine, tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    assert await resolve_level("auto") == "landlock"
    with pytest.raises(ConfigurationError, match=r"No permissions to create new namespace.*allow them: on Ubuntu"):
        await LocalSandbox(isolation="bubblewrap").check()


@pytest.mark.requires("landlock")
async def test_auto_rejects_a_level_that_shows_the_hosts_files(
    unknown_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A level counts as working only if code under it could not read a file. Installed parts are not enough."""
    unknown_machine.setenv("PATH", str(tmp_path))
    await LocalSandbox(isolation="landlock").check()
    isolation_level._reasons.clear()
    unknown_machine.setattr(creation, "build_confinement", lambda *_: {"limits": {}})
    for isolation in ("auto", "landlock"):
        with pytest.raises(ConfigurationError, match="could read a file outside"):
            await resolve_level(isolation)  # type: ignore[arg-type]


async def test_a_machine_without_isolation_gets_instructions_and_never_runs_unisolated(
    unknown_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unknown_machine.setenv("PATH", str(tmp_path))
    unknown_machine.setattr(levels, "find_landlock_abi", lambda: 0)
    block = LocalSandbox()
    for action in (lambda: resolve_level(block.isolation), block.check, lambda: block.open(block.labels(""))):
        with pytest.raises(ConfigurationError) as refused:
            await action()
        for words in ("apt install bubblewrap", "Landlock", "the provider container", "local:none", "not on the PATH"):
            assert words in str(refused.value)
    with pytest.raises(ConfigurationError, match="cannot isolate"):
        async with block.interpreter() as interpreter:
            await interpreter.execute("pass")
    assert await block.list_sandboxes() == []
    for level in ("bubblewrap", "landlock"):
        with pytest.raises(ConfigurationError, match=f"'{level}' does not work"):
            await LocalSandbox(isolation=level).check()
    async with LocalSandbox(isolation="none").interpreter() as interpreter:
        result = await interpreter.execute("SUBMIT(works=True)")
    assert (result.meta.isolation, result.meta.layers) == ("none", ())


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "riscv64")])
async def test_an_unsupported_system_is_named(
    unknown_machine: pytest.MonkeyPatch, system: str, machine: str, tmp_path: Path
) -> None:
    unknown_machine.setattr(sys, "platform", system)
    if system == "linux":
        unknown_machine.setattr("platform.machine", lambda: machine)
    with pytest.raises(ConfigurationError, match="Linux" if system != "linux" else "x86_64 or aarch64"):
        await resolve_level("auto")


# ------------------------------------------------------------------------------------------------- listing and removing


async def test_a_sandbox_is_listed_with_its_labels_while_it_is_open(level: str) -> None:
    block = LocalSandbox(isolation=level, lifetime=600)  # type: ignore[arg-type]
    async with block.interpreter(run="run-1") as interpreter:
        sandbox = (await interpreter.execute("pass")).meta.sandbox_id
        (listed,) = [info for info in await block.list_sandboxes() if info.id == sandbox]
        assert listed.labels["managed-by"] == "rlm-batch"
        assert listed.labels["rlm-batch-run"] == "run-1"
        assert listed.labels["rlm-batch-host"]
        assert listed.expires > 0
    assert sandbox not in {info.id for info in await block.list_sandboxes()}


@pytest.mark.usefixtures("no_process_left")
async def test_deleting_a_sandbox_while_code_runs_is_a_loss_and_not_a_crash(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_directory = os.listdir

    def list_youngest_first(path: str) -> list[str]:
        """List the highest ids first. Ids wrap around, so a driver may have a higher id than its code."""
        return sorted(list_directory(path), key=lambda name: -int(name) if name.isdigit() else 0)

    block, heard = LocalSandbox(isolation=level), asyncio.Event()  # type: ignore[arg-type]
    async with block.interpreter() as interpreter:
        code = "print('on', flush=True); import time; time.sleep(1000)"
        running = asyncio.ensure_future(interpreter.execute(code, on_output=lambda *_: heard.set()))
        await heard.wait()
        sandbox = interpreter.sandbox.id
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", list_youngest_first)
            await block.delete_sandbox(sandbox)
        with pytest.raises(OutcomeUnknown):
            await running
        with pytest.raises(SandboxLost):
            await interpreter.execute("pass")
    assert not (Path(tempfile.gettempdir()) / sandbox).exists()


async def test_the_next_reap_deletes_a_folder_that_took_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = tmp_path / "rm"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setattr(deletion, "REMOVAL_SECONDS", 0.5, raising=False)
    block = LocalSandbox(isolation="none")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        async with block.interpreter() as interpreter:
            await interpreter.execute("open('left', 'w').close()")
            sandbox = interpreter.sandbox.id
        assert f"{sandbox} of a sandbox could not be removed: reap again" in caplog.text
        with pytest.raises(RlmBatchError, match="could not be removed in time"):
            await block.delete_sandbox(sandbox)
    monkeypatch.undo()
    assert sandbox in {info.id for info in await block.list_sandboxes() if info.abandoned}
    await block.delete_sandbox(sandbox)
    assert not (Path(tempfile.gettempdir()) / sandbox).exists()


async def test_only_local_sandboxes_that_exist_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of-another").mkdir(mode=0o755)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not await LocalSandbox().delete_sandbox("rlm-batch-000000000000")
    for name in ("", "x", "../rlm-batch-x", "rlm-batch-/../x", "/tmp/rlm-batch-x", "rlm-batch-x/../.."):
        with pytest.raises(ConfigurationError, match="is not a local sandbox"):
            await LocalSandbox().delete_sandbox(name)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    assert [path.name for path in tmp_path.iterdir()] == ["of-another"]


async def test_a_folder_with_a_damaged_record_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    records = ("", "{", "[]", "5", "null", '{"pid": 1}', '{"labels": 5}', "\xff")
    for number, text in enumerate(records):
        folder = tmp_path / f"rlm-batch-{number:012}"
        folder.mkdir()
        (folder / "sandbox.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "rlm-batch-file").write_text("no folder")
    (tmp_path / "rlm-batch-empty").mkdir()
    assert [info for info in await LocalSandbox().list_sandboxes() if type(info.labels) is dict] == []
    await LocalSandbox().delete_sandbox("rlm-batch-000000000000")
    assert not (tmp_path / "rlm-batch-000000000000").exists()


@pytest.mark.requires("root")  # only root can create files of another user
async def test_folders_planted_by_another_user_are_neither_listed_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp, any user may make a folder that looks like a sandbox's, with any process id in its record."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "rlm-batch-00000000000a"
    (folder / "work").mkdir(parents=True)
    process = subprocess.Popen(["sleep", "1000"], cwd="/")  # noqa: ASYNC220 - it starts at once
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    record = {"labels": {"managed-by": "rlm-batch"}, "pid": process.pid, "started": started}
    (folder / "sandbox.json").write_text(json.dumps(record))
    for path in (folder, folder / "work", folder / "sandbox.json"):
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    (tmp_path / "rlm-batch-00000000000b").symlink_to(tmp_path)
    try:
        assert await LocalSandbox().list_sandboxes() == []
        await LocalSandbox().delete_sandbox("rlm-batch-00000000000a")
        await LocalSandbox().delete_sandbox("rlm-batch-00000000000b")
        assert (folder / "sandbox.json").exists()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


HOSTILE = {
    "closed directories": """
os.makedirs("a/b/c")
open("a/b/c/file", "w").close()
for path in ("a/b/c", "a/b", "a"):
    os.chmod(path, 0)
os.mkdir("unwritable", 0o500)
os.mkdir("unreadable", 0o300)
""",
    "a tree deeper than a stack": """
for _ in range(1100):
    os.mkdir("d")
    os.chdir("d")
open("file", "w").close()
""",
    "a deep tree that is closed": """
for _ in range(300):
    os.mkdir("d", 0o700)
    os.chdir("d")
for _ in range(300):
    os.chdir("..")
    os.chmod("d", 0o500)
""",
    "names that are no text": """
for name in (b"\\xff\\xfe", b"a\\nb", b"-rf", b"...", b" ", b"\\xf0"):
    open(name, "w").close()
    os.mkdir(name + b".d")
""",
    "files of every kind": """
os.mkfifo("pipe")
os.symlink("nowhere", "dangling")
os.symlink(".", "loop")
os.symlink("..", "up")
os.symlink("/", "root")
os.link("kept", "linked") if os.path.exists("kept") else None
""",
    "many files": """
for number in range(600):
    open(f"f{number}", "w").close()
""",
}


@pytest.mark.each_once
def test_a_folder_is_deleted_whatever_code_did_to_it(own_box: Boxes) -> None:
    box = own_box()
    for number, code in enumerate(HOSTILE.values()):
        box.run(f"os.mkdir('{number}')\nos.chdir('{number}')\n{code}\nos._exit(0)")
    folder = box.folder.parent
    try:
        box.close()
        assert not folder.exists()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=False)  # too deep for pytest's own clean-up


@pytest.mark.requires("bubblewrap")
@pytest.mark.parametrize("path", ["closed/file", "closed/folder/file"])
def test_a_file_that_the_code_could_not_reach_is_not_uploaded(path: str) -> None:
    with LocalInterpreter(isolation="bubblewrap") as interpreter:
        interpreter.execute("import os\nos.mkdir('closed')\nos.chmod('closed', 0)")
        with pytest.raises(VolumeError, match="could not be written: Permission denied"):
            interpreter.upload(path, "data")


def test_deleting_a_folder_leaves_the_targets_of_its_links(own_box: Boxes, open_folder: Path) -> None:
    box = own_box()
    outside = Path(tempfile.mkdtemp(dir=open_folder))
    (outside / "file").write_text("kept")
    (outside / "inner").mkdir()
    (outside / "inner" / "file").write_text("kept")
    for path in (outside, *outside.rglob("*")):
        path.chmod(0o705 if path.is_dir() else 0o604)
        os.chown(path, box.host.uid, box.host.uid)
    before = {path: path.stat().st_mode for path in (outside, *outside.rglob("*"))}
    box.run(
        """
for closed in (0o500, 0o300, 0o100, 0):
    folder = f"under{closed}/closed"
    os.makedirs(folder)
    for number, path in enumerate(paths):
        os.symlink(path, f"{folder}/link{number}")
    os.chmod(folder, closed)
    os.chmod(os.path.dirname(folder), 0o500)
""",
        paths=[str(path) for path in before],
    )
    box.close()
    assert {path: path.stat().st_mode for path in before} == before
    assert (outside / "file").read_text() == (outside / "inner" / "file").read_text() == "kept"


# --------------------------------------------------------------------------------------------- environment and settings


async def test_code_gets_only_the_blocks_environment_variables(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "of-the-host")
    block = LocalSandbox(isolation=level, environment={"TOKEN": SecretStr("given-to-code")})  # type: ignore[arg-type]
    async with block.interpreter() as interpreter:
        result = await interpreter.execute("import os\nSUBMIT(token=os.environ['TOKEN'], all=str(dict(os.environ)))")
        sandbox = result.meta.sandbox_id
        record = (Path(tempfile.gettempdir()) / sandbox / "sandbox.json").read_text()
    assert result.token == "given-to-code"
    assert "of-the-host" not in result["all"]
    assert "given-to-code" not in record + repr(block) + repr(result.meta) + str(await block.fingerprint())


def test_a_sandbox_outlives_the_thread_that_started_it(level: Any) -> None:
    """The kernel sends the parent-death signal when the thread that forked the process ends."""
    interpreter = LocalInterpreter(isolation=level)
    starting = threading.Thread(target=interpreter.start)
    starting.start()
    starting.join()
    try:
        assert interpreter.execute("x = 1\nSUBMIT(x=x)").x == 1
        results: list[Any] = []
        executing = threading.Thread(target=lambda: results.append(interpreter.execute("SUBMIT(x=x + 1)").x))
        executing.start()
        executing.join()
        assert results == [2]
        assert interpreter.execute("SUBMIT(x=x + 2)").x == 3
    finally:
        interpreter.shutdown()


def test_one_sandbox_cannot_reach_into_another(box: Box) -> None:
    other = type(box)(box.host, box.level, fields={"lifetime": 70_000})
    sandbox = other.run("open('secret', 'w').write('x')")["sandbox"]
    attempts = box.run_attempts(
        """
for part in (".", "work", "tmp", os.path.join("work", "secret"), "sandbox.json"):
    path = os.path.join(folder, part)
    attempt(f"read {part}", lambda: os.listdir(path) if part in (".", "work", "tmp") else read(path))
    attempt(f"written {part}", lambda: os.close(os.open(f"{path}/new", os.O_CREAT | os.O_WRONLY)))
    attempt(f"mode {part}", lambda: os.rename(path, path + ".moved"))
""",
        folder=str(box.host.folders / sandbox),
    )
    assert attempts.done == {}
    assert other.outputs("SUBMIT(files=os.listdir())") == {"files": ["secret"]}
    other.close()


ELSEWHERE = """
import site, sys
site.addsitedir(sys.argv[1])
from rlm_batch import LocalInterpreter
with LocalInterpreter(isolation="bubblewrap") as interpreter:
    print(interpreter.execute("import os, sys; SUBMIT(python=sys.base_prefix, names=os.listdir('/tmp'))").outputs)
"""


@pytest.mark.requires("bubblewrap")
def test_a_python_below_tmp_runs_code_despite_the_private_tmp() -> None:
    with tempfile.TemporaryDirectory(prefix="python-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        python = copy_python(os.path.realpath(sys._base_executable), Path(folder))  # type: ignore[attr-defined]
        packages = sysconfig.get_path("purelib")
        command = [python, "-c", ELSEWHERE, packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.stdout == f"{ ({'python': folder, 'names': [Path(folder).name]}) }\n", done.stderr
