"""The local sandboxes of this machine: their folders and labels, which lost their host, and which are kept."""

import json
import os
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...sandbox.errors import RlmBatchError, SandboxLost
from ...sandbox.file_lock import try_lock
from ..provider import SandboxInfo, build_kept_labels
from .launch.driver_process import find_python

FOLDER_PREFIX = "rlm-batch-"  # A sandbox's folder has its id as its name.
FOLDER_PATTERN = re.compile(FOLDER_PREFIX + "[0-9a-f]{12}")
MARK_BASE = 1 << 62  # bytes; too large to limit a process, but less than RLIM_INFINITY
LABELS_FILE = "sandbox.json"  # labels file in a sandbox's folder; the host process locks it until it ends
CREATION_GRACE_SECONDS = 60.0  # An older folder without labels is abandoned: a live host writes them in a moment.

# A program for `python -c`. Its arguments are the sandbox's mark, the seconds to wait, and the folder. It has the mark,
# so that the removal of the sandbox ends it too. It leaves its parent, which waits only for the fork.
KEEPER = """
import os, resource, sys
mark, seconds, folder = sys.argv[1:]
if os.fork():
    os._exit(0)
os.setsid()
resource.setrlimit(resource.RLIMIT_RSS, (int(mark), int(mark)))
remove = 'rm -rf -- "$2" || { chmod -R u+rwX -- "$2"; rm -rf -- "$2"; }'
wait = 'sleep "$1" & trap "kill $!; exit 1" TERM; wait $!; '
os.execv("/bin/sh", ["sh", "-c", wait + remove, "rlm-batch-keeper", seconds, folder])
"""


def list_sandboxes() -> list[SandboxInfo]:
    """Return this user's sandboxes in this temporary directory."""
    sandboxes: list[SandboxInfo] = []
    for folder in Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"):
        info = _read_info(folder) if is_own_directory(folder) else None
        if info is not None:
            sandboxes.append(info)
    return sandboxes


def pick_folder() -> Path:
    """Return a path for a new sandbox's folder."""
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.urandom(6).hex()}"


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
            is_old = time.time() - folder.stat().st_mtime > CREATION_GRACE_SECONDS
            if is_old and FOLDER_PATTERN.fullmatch(folder.name):
                return SandboxInfo(folder.name, {"managed-by": "rlm-batch"}, abandoned=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """Return a sandbox's `labels`, and the path of its control `group`. Raises OSError, or ValueError if damaged."""
    return json.loads((folder / LABELS_FILE).read_text(encoding="utf-8"))


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


def leave_folder(folder: Path, until: float, execution: int | None) -> None:
    """Mark a folder as kept until then, in epoch seconds, and start its keeper. Raises RlmBatchError."""
    try:
        labels = read_record(folder)["labels"]
        lock = write_locked_labels(folder, {**labels, **build_kept_labels(until, execution)})
        with open(lock, "rb"):  # The lock ends with the block.
            seconds = max(0.0, until - time.time())
            arguments = [str(compute_mark(folder)), f"{seconds:.0f}", str(folder)]
            subprocess.run(
                [find_python(), "-I", "-S", "-c", KEEPER, *arguments],
                check=True,
                cwd="/",
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        raise RlmBatchError(f"the folder {folder} could not be kept: {error}") from error


@contextmanager
def lock_kept_folder(sandbox_id: str) -> Iterator[Path]:
    """Yield the folder of a kept sandbox, locked until the block ends.

    Raises SandboxLost if the sandbox is gone, or RlmBatchError if another terminal is open in it.
    """
    folder = Path(tempfile.gettempdir()) / sandbox_id
    if not any(info.id == sandbox_id and info.kept_until for info in list_sandboxes()):
        raise SandboxLost(f"the sandbox {sandbox_id} is gone")
    with open(folder / LABELS_FILE, "rb") as file:
        # Another terminal may have replaced the file after it was opened here.
        if not try_lock(file) or not os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LABELS_FILE)):
            raise RlmBatchError(f"another terminal is open in the sandbox {sandbox_id}: close it first")
        yield folder


def read_kept_until(folder: Path) -> float:
    """Return the time until which a folder is kept, in epoch seconds; 0 if it is being removed."""
    with suppress(OSError, ValueError, KeyError):
        return float(read_record(folder)["labels"]["rlm-batch-kept"])
    return 0.0
