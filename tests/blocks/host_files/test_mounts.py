"""Mounted data of the host: allowed paths, refusals before a sandbox starts, and the digests in a result's key."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, LocalInterpreter, LocalSandbox, SandboxStartError
from rlm_batch.blocks.daytona.provider import DaytonaProvider
from rlm_batch.blocks.host_files import mounts as module
from rlm_batch.blocks.host_files import source_tree
from rlm_batch.blocks.host_files.mounts import read_mounts
from rlm_batch.blocks.local.isolation import check_mount_places, find_python_prefixes

from ...infra.isolation_levels import find_strongest_level
from ...infra.requirements import mark_level

READ = """
import os
SUBMIT(rows=open("/data/set/rows.csv").read(), one=open("/one.bin").read(), beside=sorted(os.listdir("/data/set")))
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a file and a directory, make its parent the working directory, and return the folder."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "rows.csv").write_text("1,2\n")
    monkeypatch.chdir(tmp_path)
    return folder


def choose_place(level: str, source: Path) -> str:
    """Return a mount target that the level supports."""
    return "/data/set" if level == "bubblewrap" else str(source)


def fingerprint(mounts: dict[str, Any], *, is_uploaded: bool = False) -> list[str]:
    """Return the digests of the mounts that a result's key contains."""
    return [mount.digest for mount in read_mounts(mounts, is_uploaded=is_uploaded)]


@pytest.mark.requires("bubblewrap")
def test_code_reads_data_at_its_mount_path_and_sees_edits(data: Path) -> None:
    mounts = {"/data/set/": "data", "/one.bin": data / "rows.csv", "/tmp/below/it/one": data / "rows.csv"}
    with LocalInterpreter(isolation="bubblewrap", mounts=mounts, volume_name=None) as interpreter:
        assert interpreter.execute("SUBMIT(x=open('/tmp/below/it/one').read())").x == "1,2\n"
        for place in ("/tmp/below", "/tmp/below/it", "/tmp/below/it/one"):
            # A renamed mount would be missing in later executions.
            with pytest.raises(CodeError, match=r"PermissionError|busy"):
                interpreter.execute("import os; os.rename(place, place + '-away')", {"place": place})
        (data / "rows.csv").write_text("3\n")
        result = interpreter.execute(READ)
    assert result.outputs == {"rows": "3\n", "one": "3\n", "beside": ["rows.csv", "sub"]}


def test_a_mount_path_that_the_sandbox_needs_is_refused(data: Path) -> None:
    needed = ("/", "/usr", "/usr/share/x", "/proc", "/dev/shm", "/etc", "/tmp")
    needed += ("/sandbox", "/packages/x", "/python-path", "//usr")
    relative: tuple[Any, ...] = ("data", "", "/data/../usr", "/data\n", "/data\0", 7)
    for targets, words in ((needed, "used by the sandbox itself"), (relative, "not an absolute path")):
        for target in targets:
            with pytest.raises(ConfigurationError, match=words):
                LocalInterpreter(mounts={target: data})


def test_overlapping_mounts_and_paths_of_volume_or_python_are_refused(data: Path, volumes: Path) -> None:
    for other in ("/data/", "/data/sub", "//data"):
        with pytest.raises(ConfigurationError, match="overlap"):
            LocalInterpreter(mounts={"/data": data, other: data})
    with pytest.raises(ConfigurationError, match="overlaps the volume shared"):
        LocalInterpreter(mounts={"/data/set": data}, volume_name="shared")
    (volumes / "shared").mkdir(parents=True)
    for source in (volumes, volumes / "shared"):
        with pytest.raises(ConfigurationError, match="overlap: leave the mount out"):
            LocalInterpreter(mounts={"/elsewhere": source}, volume_name="shared")
    for prefix in find_python_prefixes():  # The system's Python has none: its directories are refused as the system's.
        for target in (prefix, os.path.dirname(prefix), f"{prefix}/lib/x"):
            (mount,) = read_mounts({target: data}, is_uploaded=False)
            with pytest.raises(ConfigurationError, match="contains Python's files"):
                check_mount_places([mount], "bubblewrap")


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_mounting_a_way_to_the_host_is_refused(data: Path) -> None:
    for make in (os.mkfifo, _make_socket):
        make(Path(os.path.relpath(data / "sub" / "way")))
        for source in (data, data / "sub" / "way"):
            with pytest.raises(ConfigurationError, match=r"sub/way is a pipe, a socket, a device"):
                read_mounts({"/data": source}, is_uploaded=False)
        (data / "sub" / "way").unlink()


@pytest.mark.usefixtures("data")
def test_mounting_anything_but_data_is_refused() -> None:
    refused: list[tuple[Any, str]] = [
        ("nowhere", "there is no 'nowhere'"),
        ("/", "the whole machine"),
        ("/proc/self", "or the kernel's"),
        ("", "there is no ''"),
        (tempfile.gettempdir(), "temporary files"),
    ]
    for source, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            LocalInterpreter(mounts={"/data": source})


def test_without_namespaces_data_keeps_its_path_and_the_error_says_so(data: Path) -> None:
    for level in ("landlock", "none"):
        interpreter = LocalInterpreter(isolation=level, mounts={"/data": data})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=rf"mount it at '{data}'"):
            interpreter.start()


@pytest.mark.parametrize("exchange", ["removed", "another", "a link"])
def test_data_that_was_replaced_after_its_check_is_not_mounted(exchange: str, data: Path) -> None:
    interpreter = LocalInterpreter(mounts={choose_place(find_strongest_level(), data): data})
    data.rename(data.with_name("was"))
    if exchange == "a link":
        data.symlink_to("/etc")
    elif exchange == "another":
        data.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be opened|was replaced"):
        interpreter.start()


@pytest.mark.parametrize("level", [pytest.param(name, marks=mark_level(name)) for name in ("bubblewrap", "landlock")])
@pytest.mark.parametrize("place", ["itself", "above"])
def test_a_link_planted_just_before_the_mount_is_not_followed(
    level: Any, place: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that can write to a volume could do this if the mounted data is on that volume."""
    secret = tmp_path / "elsewhere"
    (secret / "sub").mkdir(parents=True)
    (secret / "secret").write_text("of the host")
    source = data if place == "itself" else data / "sub"
    interpreter = LocalInterpreter(isolation=level, mounts={choose_place(level, source): source})
    check = module.HostMount.check_source

    def exchange_after(mount: module.HostMount) -> None:
        check(mount)
        data.rename(data.with_name("was"))
        data.symlink_to(secret)

    monkeypatch.setattr(module.HostMount, "check_source", exchange_after)
    with pytest.raises(SandboxStartError, match="exchanged for something else"):
        interpreter.start()


def test_the_key_covers_paths_sizes_and_times_or_bytes_of_uploads(data: Path) -> None:
    mounts = {"/data/set": data}
    first, sent = fingerprint(mounts), fingerprint(mounts, is_uploaded=True)
    assert fingerprint({"/data/set": "data"}) == first  # the key ignores how the path was written
    os.utime(data / "rows.csv", (1, 1))
    touched = fingerprint(mounts)
    assert touched != first
    assert fingerprint(mounts, is_uploaded=True) == sent
    (data / "rows.csv").write_text("1,3\n")
    os.utime(data / "rows.csv", (1, 1))
    assert fingerprint(mounts) == touched  # the key ignores bytes, because reading a terabyte takes too long
    assert fingerprint(mounts, is_uploaded=True) != sent
    (data / "more").symlink_to("rows.csv")
    assert fingerprint(mounts) != touched
    assert json.dumps(fingerprint(mounts))


@pytest.mark.anyio
async def test_a_run_without_mounts_keeps_its_key(data: Path) -> None:
    plain = await LocalSandbox(isolation="none").fingerprint()
    assert await LocalSandbox(isolation="none").with_files(mounts={}).fingerprint() == plain
    assert set(await LocalSandbox(isolation="none").with_files(mounts={"/d": data}).fingerprint()) - set(plain) == {
        "mounts"
    }


def test_data_too_large_to_upload_is_refused_by_name(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = data / "sub" / "more"
    for name, most in (("MAX_FILES", 1), ("MAX_BYTES", 6)):
        with monkeypatch.context() as limited:
            limited.setattr(source_tree, name, most)
            DaytonaProvider().with_files(mounts={"/data": data})
            more.write_text("12345")
            LocalSandbox().with_files(mounts={"/data": data})  # local sandboxes need no upload
            with pytest.raises(
                ConfigurationError, match=r"there are more than .* files or .* MiB: put data on a volume"
            ):
                DaytonaProvider().with_files(mounts={"/data": data})
            more.unlink()
    more.symlink_to("/etc/passwd")
    with pytest.raises(ConfigurationError, match="sub/more is a symbolic link, which cannot be uploaded"):
        DaytonaProvider().with_files(mounts={"/data": data})


@pytest.mark.anyio
@pytest.mark.usefixtures("as_worker")
async def test_a_deployments_run_mounts_only_paths_that_its_worker_allows(
    data: Path, tmp_path: Path, allow: Callable[..., None]
) -> None:
    link = tmp_path / "allowed" / "link"
    link.parent.mkdir()
    link.symlink_to(data)
    for source in (data, link):
        allow(allowed_paths=[str(tmp_path / "allowed")])
        with pytest.raises(ConfigurationError, match="allowed_paths"):
            LocalSandbox().with_files(mounts={"/data": source})
        allow(allowed_paths=[str(data)])
        assert (await LocalSandbox().with_files(mounts={"/data": source}).fingerprint())["mounts"]
