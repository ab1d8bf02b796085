"""Local volumes: owners and permissions of their files, and the host's protection against hostile files."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlm_batch import ConfigurationError, LocalInterpreter, Volume, VolumeError
from rlm_batch.blocks.storage.local_volume import LocalVolume
from rlm_batch.blocks.volume import VolumeFile

if TYPE_CHECKING:
    from .boxes import Boxes


@pytest.fixture
def root(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a root where every user may create volumes."""
    folder = Path(tempfile.mkdtemp(prefix="volumes-", dir=open_folder))
    folder.chmod(0o1777)
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------------- between sandboxes


def test_the_next_sandbox_and_the_host_read_and_replace_a_sandboxs_files(own_box: Boxes, root: Path) -> None:
    code = """
import tempfile
seen = {path: load_from_volume(path) for path in list_volume()}
save_to_volume("saved/same.txt", word)
for path in ("direct/deep/same.txt", "top.txt"):
    os.makedirs(os.path.dirname(f"{VOLUME}/{path}"), exist_ok=True)
    with open(f"{VOLUME}/{path}", "w") as file:
        file.write(word)
with tempfile.NamedTemporaryFile("w", dir=VOLUME, delete=False) as file:
    file.write(word)
os.replace(file.name, VOLUME + "/private.txt")
os.mkdir(f"{VOLUME}/saved/{word}")
SUBMIT(seen=seen)
"""
    names = ["direct/deep/same.txt", "private.txt", "saved/same.txt", "top.txt"]
    before: dict[str, str] = {}
    for word in ("one", "two", "three"):
        box = own_box(volume_name="shared", volume_root=str(root))
        assert box.outputs(code, word=word)["seen"] == before
        box.close()
        before = dict.fromkeys(names, word)
    volume = LocalVolume(root, "shared")
    assert asyncio.run(volume.ls()) == [VolumeFile(name, 5) for name in names]
    assert [asyncio.run(volume.get(name)) for name in names] == [b"three"] * 4


def test_a_sandbox_reaches_no_volume_but_its_own(own_box: Boxes, root: Path) -> None:
    writer = own_box(volume_name="secret", volume_root=str(root))
    mount = writer.outputs("save_to_volume('key.txt', 'secret')\nSUBMIT(mount=VOLUME)")["mount"]
    attempts = """
for place in places:
    attempt("read " + place, lambda: read(place + "/key.txt"))
    attempt("list " + place, lambda: os.listdir(place)[0])
    attempt("write " + place, lambda: write(place + "/new.txt", b"x", os.O_WRONLY | os.O_CREAT))
    attempt("remove " + place, lambda: os.remove(place + "/key.txt"))
"""
    places = [str(root / "secret")]
    for fields in ({}, {"volume_name": "other", "volume_root": str(root)}):
        box = own_box(**fields)
        outcomes = box.run_attempts(attempts, places=[*places, *([mount] if not fields else [])])
        assert outcomes.done == {}
        box.close()
    assert writer.outputs("SUBMIT([load_from_volume('key.txt'), list_volume()])")["output"] == ["secret", ["key.txt"]]


def test_a_volume_makes_no_other_path_writable(own_box: Boxes, root: Path) -> None:
    (root / "beside").mkdir(mode=0o777)
    (root / "beside").chmod(0o777)
    box = own_box(volume_name="mine", volume_root=str(root))
    attempts = box.run_attempts(
        """
attempt("beside", lambda: write(root + "/beside/x", b"x", os.O_WRONLY | os.O_CREAT))
attempt("root", lambda: write(root + "/x", b"x", os.O_WRONLY | os.O_CREAT))
attempt("above", lambda: write(VOLUME + "/../x", b"x", os.O_WRONLY | os.O_CREAT))
os.symlink(root + "/beside", VOLUME + "/out")
attempt("link", lambda: write(VOLUME + "/out/x", b"x", os.O_WRONLY | os.O_CREAT))
""",
        root=str(root),
    )
    assert attempts.done == {}
    assert list((root / "beside").iterdir()) == []


@pytest.mark.requires("root")
def test_another_user_cannot_read_the_volume_of_a_root_host(root: Path) -> None:
    with LocalInterpreter(volume_name="private", volume_root=str(root)) as interpreter:
        interpreter.execute("save_to_volume('x', 'y')")
    assert (root / "private").stat().st_mode & 0o007 == 0


def test_scripts_that_create_a_volume_together_get_the_same_one(root: Path) -> None:
    def work(number: int) -> int:
        with LocalInterpreter(volume_name="raced", volume_root=str(root)) as interpreter:
            code = "import os; save_to_volume(f'{n}.txt', str(n)); SUBMIT(os.stat(VOLUME).st_gid)"
            return int(interpreter.execute(code, {"n": number}).output)

    with ThreadPoolExecutor(6) as pool:
        groups = set(pool.map(work, range(6)))
    assert len(groups) == 1
    volume = Volume("raced")
    assert [volume.get(f"{number}.txt") for number in range(6)] == [str(number).encode() for number in range(6)]


def test_volumes_are_stored_where_the_block_or_environment_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalInterpreter(isolation="none", volume_name="a") as interpreter:
        assert interpreter.execute("SUBMIT(VOLUME)").output == os.path.realpath(root / "a")
    with LocalInterpreter(isolation="none", volume_name="a", volume_root=str(tmp_path)) as interpreter:
        assert interpreter.execute("SUBMIT(VOLUME)").output == os.path.realpath(tmp_path / "a")
    monkeypatch.delenv("RLM_BATCH_VOLUMES")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with LocalInterpreter(isolation="none", volume_name="a") as interpreter:
        place = tmp_path / "data" / "rlm-batch" / "volumes" / "a"
        assert interpreter.execute("SUBMIT(VOLUME)").output == os.path.realpath(place)


@pytest.mark.requires("bubblewrap")
def test_a_mount_path_that_the_sandbox_needs_is_refused(root: Path) -> None:
    for path in ("/", "/usr", "/usr/share", "/etc/data", "/proc/x", "/dev", "/tmp", "/sandbox"):
        with pytest.raises(ConfigurationError, match="volume_mount_path"):
            LocalInterpreter(isolation="bubblewrap", volume_name="a", volume_mount_path=path).start()


@pytest.mark.requires("bubblewrap")
def test_a_volume_is_mounted_where_the_block_says(root: Path) -> None:
    for path in ("/data", "/home/daytona/memory", "/mnt/a/b/", "/tmp/volume", "/sandbox/volume"):
        place = path.rstrip("/")
        with LocalInterpreter(isolation="bubblewrap", volume_name="a", volume_mount_path=path) as interpreter:
            interpreter.execute(f"open({place + '/direct.txt'!r}, 'w').write({path!r})")
            result = interpreter.execute("SUBMIT(where=VOLUME, all=list_volume())")
            assert result.outputs == {"where": place, "all": ["direct.txt"]}
        assert Volume("a").get("direct.txt") == path.encode()


def test_an_invalid_volume_name_is_refused(root: Path) -> None:
    for name in ("", ".", "..", "../x", "a/b", "-x", "x" * 101, "a b", "\n"):
        with pytest.raises(ConfigurationError):
            LocalInterpreter(volume_name=name).start()
        with pytest.raises((ConfigurationError, VolumeError)):
            Volume(name).ls()


# ------------------------------------------------------------------------------------------------------ from the host


@pytest.fixture
def volume(root: Path) -> Volume:
    """Return a volume on which code has left links, loops and pipes that could mislead the host."""
    (root / "secret.txt").write_text("the host's own")
    with LocalInterpreter(isolation="none", volume_name="left") as interpreter:
        interpreter.execute(
            """
import os
save_to_volume("dir/file.txt", "ours")
os.symlink(outside + "/secret.txt", VOLUME + "/link.txt")
os.symlink(outside, VOLUME + "/folder")
os.symlink("dir/file.txt", VOLUME + "/within.txt")
os.symlink("loop", VOLUME + "/loop")
os.mkfifo(VOLUME + "/pipe")
""",
            {"outside": str(root)},
        )
    return Volume("left")


@pytest.mark.requires("root")  # only root can give a volume its own group
def test_a_linked_volume_is_refused_and_its_target_is_unchanged(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir(mode=0o755)
    before = place.stat()
    (root / "linked").symlink_to(place)
    with pytest.raises(ConfigurationError, match="is a link to"):
        LocalVolume(root, "linked").create()
    assert (place.stat().st_mode, place.stat().st_gid) == (before.st_mode, before.st_gid)


def test_endlessly_nested_directories_are_a_one_sentence_error(root: Path) -> None:
    volume = LocalVolume(root, "nested")
    volume.create()
    at = os.open(volume.path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(VolumeError, match="more than 200 nested directories"):
        asyncio.run(volume.ls())
    subprocess.run(["rm", "-rf", str(volume.path)], check=True)  # too deep for Python's own removal


def test_the_host_follows_no_link_opens_no_pipe_and_stays_inside_the_volume(volume: Volume, root: Path) -> None:
    assert volume.ls() == volume.ls("dir") == volume.ls("dir/file.txt") == [VolumeFile("dir/file.txt", 4)]
    for path in ("link.txt", "folder/secret.txt", "loop", "pipe", "within.txt", "dir", "nosuch"):
        with pytest.raises(VolumeError):
            volume.get(path)
        if path != "dir":
            with pytest.raises(VolumeError):
                volume.ls(path)
    for path in ("", "..", "../secret.txt", "dir/../../secret.txt", "/etc/passwd", "a\0b"):
        for call in (volume.get, volume.delete, lambda path: volume.put(path, b"x")):
            with pytest.raises(VolumeError):
                call(path)
    volume.put("link.txt", "new")  # replaces the link
    assert volume.get("link.txt") == b"new"
    for path in ("folder/x", "folder/secret.txt", "loop/x", "dir/file.txt/x"):
        with pytest.raises(VolumeError):
            volume.put(path, "new")
    with pytest.raises(VolumeError):
        volume.delete("folder/secret.txt")
    volume.delete("folder")
    assert (root / "secret.txt").read_text() == "the host's own"
    assert sorted(path.name for path in root.iterdir()) == ["left", "secret.txt"]


def test_the_host_puts_a_file_where_code_can_replace_it(root: Path) -> None:
    volume = Volume("both")
    volume.put("in/deep/data.txt", "first")
    with LocalInterpreter(volume_name="both") as interpreter:
        code = """
text = load_from_volume("in/deep/data.txt")
with open(VOLUME + "/in/deep/data.txt", "w") as file:
    file.write("second")
save_to_volume("in/deep/beside.txt", "third")
SUBMIT(text)
"""
        assert interpreter.execute(code).output == "first"
    assert (volume.get("in/deep/data.txt"), volume.get("in/deep/beside.txt")) == (b"second", b"third")
    volume.put("in/deep/data.txt", b"\x00fourth")
    assert volume.get("in/deep/data.txt") == b"\x00fourth"
    volume.delete("in")
    assert volume.ls() == []


def test_a_missing_volume_is_a_one_sentence_error(root: Path) -> None:
    with pytest.raises(VolumeError, match="no volume 'nosuch'"):
        Volume("nosuch").get("x")
    with pytest.raises(ConfigurationError, match="no volume is named"):
        Volume().ls()
