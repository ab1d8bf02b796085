"""The folder of a kept local sandbox: its labels, and the process that removes it when its hour is over."""

import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ...sandbox.errors import RlmBatchError, SandboxLost
from .inventory import compute_mark, list_sandboxes, read_labels, write_locked_labels
from .launch.driver_process import find_python

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
KEPT_LABEL = "rlm-batch-kept"


def leave_folder(folder: Path, until: float) -> None:
    """Mark a folder as kept until then, in epoch seconds, and start its keeper. Raises RlmBatchError."""
    try:
        labels = read_labels(folder)
        lock = write_locked_labels(folder, {**labels, KEPT_LABEL: f"{until:.0f}"}, [])
        with open(lock, "rb"):  # The lock ends with the block.
            words = [find_python(), "-I", "-S", "-c", KEEPER, str(compute_mark(folder))]
            words += [f"{max(0.0, until - time.time()):.0f}", str(folder)]
            null = subprocess.DEVNULL
            subprocess.run(words, check=True, cwd="/", env={}, stdin=null, stdout=null, stderr=null)
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        raise RlmBatchError(f"the folder {folder} could not be kept: {error}") from error


def find_kept_folder(sandbox_id: str) -> Path:
    """Return the folder of a kept sandbox that no terminal uses. Raises SandboxLost or RlmBatchError."""
    info = next((info for info in list_sandboxes() if info.id == sandbox_id and info.kept_until), None)
    if info is None:
        raise SandboxLost(f"the sandbox {sandbox_id} is gone")
    if not info.abandoned:
        raise RlmBatchError(f"another terminal is open in the sandbox {sandbox_id}: close it first")
    return Path(tempfile.gettempdir()) / sandbox_id


def read_kept_until(folder: Path) -> float:
    """Return until when a folder is kept, in epoch seconds."""
    with suppress(OSError, ValueError, KeyError):
        return float(read_labels(folder)[KEPT_LABEL])
    return 0.0
