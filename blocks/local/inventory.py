"""The local sandboxes of this machine: their folders and labels, whose host has died, and their removal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...sandbox.errors import ConfigurationError
from ..provider import SandboxInfo

FOLDER_PREFIX = "rlm-batch-"  # of a sandbox's folder, which is named after its id
FOLDER_PATTERN = re.compile(FOLDER_PREFIX + "[0-9a-f]{12}")
LABELS_FILE = "sandbox.json"  # in the folder: its labels, in a file that its host holds locked for as long as it lives
CREATION_GRACE_SECONDS = 60.0  # after which a folder without that file is nobody's: a live host takes a moment for both
END_GRACE_SECONDS = 5.0  # for the driver to end what runs, before it is ended itself


def list_sandboxes() -> list[SandboxInfo]:
    """The sandboxes of this user in this temporary directory."""
    folders = filter(_is_own_directory, Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"))
    return [info for info in map(_read_info, folders) if info is not None]


async def delete_sandbox(sandbox_id: str) -> None:
    """Ends a sandbox's processes and removes its folder; one that has gone is no error. Raises ConfigurationError."""
    folder = Path(tempfile.gettempdir()) / sandbox_id
    if not sandbox_id.startswith(FOLDER_PREFIX) or "/" in sandbox_id:
        raise ConfigurationError(f"{sandbox_id!r} is no id of a local sandbox: they begin with {FOLDER_PREFIX}")
    if not _is_own_directory(folder):
        return  # it has gone, or somebody else has put something there
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _find_processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        for _ in range(int(END_GRACE_SECONDS / 0.05)):
            if not _find_processes(folder):
                break
            await asyncio.sleep(0.05)
    await asyncio.to_thread(remove_folder, folder)


def pick_folder() -> Path:
    """The path of a new sandbox's folder."""
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"


def _is_own_directory(folder: Path) -> bool:
    """Whether it is a directory that this user has made, in a place where others may make some too."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _read_info(folder: Path) -> SandboxInfo | None:
    """The sandbox in a folder; None where it is being removed, or is not ours."""
    try:
        with open(folder / LABELS_FILE, encoding="utf-8") as file:
            labels = json.load(file)["labels"].items()
            return SandboxInfo(folder.name, {str(key): str(value) for key, value in labels}, not _is_locked(file))
    except FileNotFoundError:
        # Its host was killed while it made the folder or removed it: the name alone says whose it is.
        with suppress(OSError):
            if FOLDER_PATTERN.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > CREATION_GRACE_SECONDS:
                return SandboxInfo(folder.name, {"managed-by": "rlm-batch"}, abandoned=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _is_locked(file: IO[str]) -> bool:
    """Whether somebody holds the file: the kernel lets go of it for a process that has died, however it did."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def write_locked_labels(folder: Path, labels: dict[str, str]) -> int:
    """Writes the labels, and returns the file's descriptor, which is locked before the file has its name.

    Not by `replace_atomically`: the lock has to stay, and with it the file.
    """
    hidden = folder / f"{LABELS_FILE}.new"
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps({"labels": labels}).encode())
        hidden.rename(folder / LABELS_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _find_processes(folder: Path) -> list[int]:
    """The ids of a sandbox's drivers and bubblewraps: its folder is in their command line, or is their directory."""
    pids: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                is_inside = os.readlink(f"/proc/{name}/cwd") == str(folder / "work")
                if is_inside or os.fsencode(folder / "work") in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids


def remove_empty_folder(folder: Path) -> bool:
    """Removes the folder of a sandbox whose code has left no files, the common case, without a thread."""
    try:
        for name in ("work", "tmp"):
            (folder / name).rmdir()
        (folder / LABELS_FILE).unlink()
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def remove_folder(folder: Path) -> None:
    """Removes a folder with whatever the code has left: trees of any depth, directories closed to their own user."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
