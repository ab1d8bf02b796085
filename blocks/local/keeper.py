"""The folder of a kept local sandbox: its labels, and the process that removes it when its hour is over."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...sandbox.errors import RlmBatchError, SandboxLost
from ...sandbox.file_lock import try_lock
from ..provider import build_kept_labels
from .inventory import LABELS_FILE, compute_mark, list_sandboxes, read_labels, write_locked_labels
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


def leave_folder(folder: Path, until: float, execution: int | None) -> None:
    """Mark a folder as kept until then, in epoch seconds, and start its keeper. Raises RlmBatchError."""
    try:
        labels = read_labels(folder)
        lock = write_locked_labels(folder, {**labels, **build_kept_labels(until, execution)})
        with open(lock, "rb"):  # The lock ends with the block.
            words = [find_python(), "-I", "-S", "-c", KEEPER, str(compute_mark(folder))]
            words += [f"{max(0.0, until - time.time()):.0f}", str(folder)]
            null = subprocess.DEVNULL
            subprocess.run(words, check=True, cwd="/", env={}, stdin=null, stdout=null, stderr=null)
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        raise RlmBatchError(f"the folder {folder} could not be kept: {error}") from error


@contextmanager
def lock_kept_folder(sandbox_id: str) -> Iterator[Path]:
    """Yield the folder of a kept sandbox, locked until the block ends. Raises SandboxLost or RlmBatchError."""
    folder = Path(tempfile.gettempdir()) / sandbox_id
    if not any(info.id == sandbox_id and info.kept_until for info in list_sandboxes()):
        raise SandboxLost(f"the sandbox {sandbox_id} is gone")
    with open(folder / LABELS_FILE, "rb") as file:
        # Another terminal may have replaced the file after it was opened here.
        if not try_lock(file) or not os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LABELS_FILE)):
            raise RlmBatchError(f"another terminal is open in the sandbox {sandbox_id}: close it first")
        yield folder


def read_kept_until(folder: Path) -> float:
    """Return until when a folder is kept, in epoch seconds; 0 if it is being removed."""
    with suppress(OSError, ValueError, KeyError):
        return float(read_labels(folder)["rlm-batch-kept"])
    return 0.0
