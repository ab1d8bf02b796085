"""Paths of the host in a flow's parameters, and the rules for the paths that a deployment's run may use."""

import errno
import os
import stat
from pathlib import Path, PurePath

from ...blocks.storage.location import Location, PathOrLocation
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.safe_paths import enter_directory_below
from ...blocks.worker_consent import check_path, is_deployment_run, resolve_links
from ...tasks.ledger.result_index import SPILLED_FILE, get_results_root, get_spill_directory


def locate_input(text: str) -> PathOrLocation:
    """Return the file or location that a parameter names. Raises ConfigurationError if the run may not read it."""
    place = parse_location(text)
    return check_input_path(place) if isinstance(place, Path) else place


def check_input_path(path: Path) -> Path:
    """Return the path if the worker allows it, or if it is a file of a long parameter. Raises ConfigurationError."""
    real = resolve_links(path)
    return real if real is not None and is_deployment_run() and _is_spilled(real) else check_path(path)


def pin_file(path: Path) -> Path:
    """Return a path by which to read a file that `check_input_path` has allowed. Raises OSError.

    Code with write access to a directory of the path, on a volume for example, could replace it by a link after the
    check. So a deployment's run opens the file without following links, and keeps it open while its process lives.
    """
    if not is_deployment_run() or not os.path.isdir("/proc/self/fd"):
        return path
    with enter_directory_below(Path("/"), path.parts[1:-1]) as at:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # Reading a pipe would wait.
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file")
        return Path(f"/proc/self/fd/{fd}")


def read_input(text: str) -> bytes:
    """Return the content of the file or location that a parameter names. Raises OSError and ConfigurationError."""
    place = locate_input(text)
    if isinstance(place, Path):
        place = pin_file(place)  # A link that code makes meanwhile does not lead elsewhere.
    return place.read_bytes()


def locate_ledger(place: str | PurePath | Location) -> PathOrLocation:
    """Return a ledger's directory or location. Raises ConfigurationError if it is not in an allowed directory."""
    place = parse_location(place)
    return check_path(place, below=get_results_root()) if isinstance(place, Path) else place


def _is_spilled(real: Path) -> bool:
    """Return True if a path without links is a file that `spilling` wrote for this user."""
    if real.parent != resolve_links(get_spill_directory()) or SPILLED_FILE.fullmatch(real.name) is None:
        return False
    try:
        status = os.lstat(real)
    except OSError:
        return True  # Reading the missing file raises.
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
