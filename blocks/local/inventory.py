"""The local sandboxes of this machine: their folders and labels, and which of them lost their host."""

import json
import os
import re
import stat
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...sandbox.file_lock import try_lock
from ..provider import SandboxInfo

FOLDER_PREFIX = "rlm-batch-"  # A sandbox's folder has its id as its name.
FOLDER_PATTERN = re.compile(FOLDER_PREFIX + "[0-9a-f]{12}")
MARK_BASE = 1 << 62  # bytes; too large to limit a process, but less than RLIM_INFINITY
LABELS_FILE = "sandbox.json"  # labels file in a sandbox's folder; the host process locks it until it ends
CREATION_GRACE_SECONDS = 60.0  # An older folder without labels is abandoned: a live host writes them in a moment.


def list_sandboxes() -> list[SandboxInfo]:
    """Return this user's sandboxes in this temporary directory."""
    folders = filter(is_own_directory, Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"))
    return [info for info in map(_read_info, folders) if info is not None]


def pick_folder() -> Path:
    """Return a path for a new sandbox's folder."""
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"


def compute_mark(folder: Path) -> int:
    """Return the number that marks a sandbox's processes: their limit on resident memory, which no kernel enforces.

    Code can change a process's directory, session, parent and command line, but not this limit.
    """
    return MARK_BASE + int(folder.name.removeprefix(FOLDER_PREFIX), 16)


def is_own_directory(folder: Path) -> bool:
    """Return whether a path is a directory of this user; others may create directories there too."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _read_info(folder: Path) -> SandboxInfo | None:
    """Return the sandbox in a folder; None if it is being removed, or is no sandbox of this project."""
    try:
        with open(folder / LABELS_FILE, encoding="utf-8") as file:
            labels = {str(key): str(value) for key, value in json.load(file)["labels"].items()}
            # A live host holds the file's lock.
            return SandboxInfo(folder.name, labels, abandoned=try_lock(file, is_shared=True))
    except FileNotFoundError:
        # The host was killed while it created or removed the folder. Only the name identifies the sandbox.
        with suppress(OSError):
            if FOLDER_PATTERN.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > CREATION_GRACE_SECONDS:
                return SandboxInfo(folder.name, {"managed-by": "rlm-batch"}, abandoned=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def read_labels(folder: Path, part: str = "labels") -> Any:
    """Return a sandbox's labels, or its control `group`. Raises OSError, ValueError or KeyError for a damaged file."""
    return json.loads((folder / LABELS_FILE).read_text(encoding="utf-8"))[part]


def write_locked_labels(folder: Path, labels: dict[str, str], group: str = "") -> int:
    """Write the labels and the path of the control group, and return the locked file's descriptor.

    The file is locked before it gets its name. `replace_atomically` does not fit, because the lock belongs to this open
    file.
    """
    hidden = folder / f"{LABELS_FILE}.new"
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try_lock(descriptor)
        os.write(descriptor, json.dumps({"labels": labels, "group": group}).encode())
        hidden.rename(folder / LABELS_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
