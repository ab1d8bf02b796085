"""The local sandboxes of this machine: their folders and labels, and whose host has died."""

import fcntl
import json
import os
import re
import stat
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..provider import SandboxInfo

FOLDER_PREFIX = "rlm-batch-"  # of a sandbox's folder, which is named after its id
FOLDER_PATTERN = re.compile(FOLDER_PREFIX + "[0-9a-f]{12}")
MARK_BASE = 1 << 62  # no limit at all, and less than what stands for none
LABELS_FILE = "sandbox.json"  # in the folder: its labels, in a file that its host holds locked for as long as it lives
USERS_FILE = "passwd"  # in the directory of its Python, where it stands for /etc/passwd
CREATION_GRACE_SECONDS = 60.0  # after which a folder without that file is nobody's: a live host takes a moment for both


def list_sandboxes() -> list[SandboxInfo]:
    """The sandboxes of this user in this temporary directory."""
    folders = filter(is_own_directory, Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"))
    return [info for info in map(_read_info, folders) if info is not None]


def pick_folder() -> Path:
    """The path of a new sandbox's folder."""
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"


def compute_mark(folder: Path) -> int:
    """The number that a sandbox's processes carry as their limit on resident memory, which no kernel enforces.

    Whatever directory, session, parent or command line the code gives a process, that limit it cannot change.
    """
    return MARK_BASE + int(folder.name.removeprefix(FOLDER_PREFIX), 16)


def is_own_directory(folder: Path) -> bool:
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


def read_groups(folder: Path) -> list[str]:
    """The directories of a sandbox's control groups, which are named after it."""
    try:
        paths = json.loads((folder / LABELS_FILE).read_text(encoding="utf-8"))["groups"]
        return [path for path in paths if isinstance(path, str) and os.path.basename(path) == folder.name]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_locked(file: IO[str]) -> bool:
    """Whether somebody holds the file: the kernel lets go of it for a process that has died, however it did."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def write_locked_labels(folder: Path, labels: dict[str, str], groups: list[str]) -> int:
    """Writes the labels and the paths of the sandbox's control groups, and returns the file's descriptor.

    It is locked before the file has its name.
    Not by `replace_atomically`: the lock has to stay, and with it the file.
    """
    hidden = folder / f"{LABELS_FILE}.new"
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps({"labels": labels, "groups": groups}).encode())
        hidden.rename(folder / LABELS_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
