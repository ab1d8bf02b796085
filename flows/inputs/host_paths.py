"""Paths of the host that come as a flow's parameters: which of them a deployment's run may read and write."""

import errno
import os
import re
import stat
from pathlib import Path, PurePath

from ...blocks.storage.location import Location, PathOrLocation
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.safe_paths import enter_directory_below
from ...blocks.worker_consent import check_path, is_deployment_run, resolve_links
from ...tasks.ledger.result_index import get_results_root

SPILLED_FILE = re.compile(r"[0-9a-f]{24}\.(jsonl|txt)")  # a hash of what is in it


def get_spill_directory() -> Path:
    """Where parameters that are too long for Prefect are written to."""
    return get_results_root() / "inputs"


def locate_input(text: str) -> PathOrLocation:
    """The file or the location that a parameter names. Raises ConfigurationError where the run may not read it."""
    place = parse_location(text)
    return check_input_path(place) if isinstance(place, Path) else place


def check_input_path(path: Path) -> Path:
    """The path, if this run may read it: the worker allows it, or a parameter was spilled there.

    Raises ConfigurationError.
    """
    real = resolve_links(path)
    return real if real is not None and is_deployment_run() and _is_spilled(real) else check_path(path)


def pin_file(path: Path) -> Path:
    """A path by which the file is read, once `check_input_path` has let it through. Raises OSError.

    Code may write to a directory on the way, on a volume say, and put a link in its place after the look. So a
    deployment's run opens the file without following any, and reads that one, for as long as its process lives.
    """
    if not is_deployment_run() or not os.path.isdir("/proc/self/fd"):
        return path
    with enter_directory_below(Path("/"), path.parts[1:-1]) as at:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe would be waited for
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file")
        return Path(f"/proc/self/fd/{fd}")


def locate_ledger(place: str | PurePath | Location) -> PathOrLocation:
    """The directory or the location of a ledger, which is below the results root or where the worker allows it.

    Raises ConfigurationError.
    """
    place = parse_location(place)
    return check_path(place, below=get_results_root()) if isinstance(place, Path) else place


def _is_spilled(real: Path) -> bool:
    """Whether a path without links is one that this user's parameters are spilled to."""
    if real.parent != resolve_links(get_spill_directory()) or SPILLED_FILE.fullmatch(real.name) is None:
        return False
    try:
        status = os.lstat(real)
    except OSError:
        return True  # there is nothing to read, which whoever reads it tells
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
