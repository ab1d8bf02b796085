"""Finding and opening files below a directory of the host without following links, which code could have created."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from ...sandbox.errors import ConfigurationError
from ..storage.safe_paths import enter_directory_below
from ..worker_consent import check_path, is_deployment_run, resolve_links

# The limits on the files of one parameter. The host keeps them in memory, and each sandbox on another machine gets an
# upload, which takes six seconds at 10 MiB/s.
MAX_FILES = 10_000
MAX_BYTES = 64 * 1024 * 1024
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def locate_source(text: str, parameter: str) -> Path:
    """Return the host's file or directory that a parameter names, with links resolved.

    Raises:
        ConfigurationError: The source is missing or `/`, or a deployment run may not use it.
    """
    path = check_path(Path(os.path.expanduser(text)).absolute())  # `expanduser` keeps an unknown user's `~`.
    real = path if is_deployment_run() else resolve_links(path)  # `check_path` resolved a deployment run's links.
    if not text.strip() or real is None or not real.exists():
        raise ConfigurationError(f"{parameter}: there is no {text!r} on this machine")
    if real == Path("/"):
        raise ConfigurationError(f"{parameter}: {text} is the whole machine: name a directory in it")
    return real


def check_open_to_others(parameter: str, *paths: Path) -> None:
    """Raise ConfigurationError if other users may not read a file or directory. Under root, code has another user."""
    for path in paths:
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            raise ConfigurationError(
                f"{parameter}: {path} is not readable by other users, and the sandbox's code runs as one: "
                f"chmod -R o+rX {path}, or run as an ordinary user"
            )


@contextmanager
def open_source(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file or directory at a path without links. Raises OSError if a part has become a link."""
    with enter_directory_below(Path("/"), path.parts[1:-1]) as at:
        fd = os.open(path.name, OPEN_FLAGS, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


class ReadBudget:
    """The number of files and bytes that may still be read for a parameter."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._files = MAX_FILES
        self._bytes = MAX_BYTES

    def spend(self, source: Path, size: int) -> None:
        """Count a file. Raises ConfigurationError if the files exceed the limits."""
        self._files -= 1
        self._bytes -= size
        if self._files < 0 or self._bytes < 0:
            raise ConfigurationError(
                f"{self._parameter}: with {source} there are more than {MAX_FILES:,} files or {MAX_BYTES >> 20} MiB: "
                "put data on a volume"
            )

    def read_files(self, directory: int, source: Path, left_out: tuple[str, ...] = ()) -> dict[str, bytes]:
        """Return the contents of the regular files below an open directory, by path.

        Args:
            directory: Descriptor of the directory.
            source: The path of the directory, for messages.
            left_out: Patterns for names of files and directories to skip.

        Raises:
            ConfigurationError: The files exceed the limits.
            OSError: A file or a directory cannot be read.
        """
        files: dict[str, bytes] = {}
        for folder, subfolders, names, fd in os.fwalk(".", dir_fd=directory, onerror=raise_error):
            subfolders[:] = _sort_without(subfolders, left_out)  # `fwalk` enters only these.
            for name in _sort_without(names, left_out):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    self.spend(source, status.st_size)
                    with open(os.open(name, OPEN_FLAGS, dir_fd=fd), "rb") as file:
                        files[os.path.normpath(f"{folder}/{name}")] = file.read(status.st_size)
        return files


def _sort_without(names: list[str], left_out: tuple[str, ...]) -> list[str]:
    """Return the sorted names that match no pattern of `left_out`."""
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in left_out))


def raise_error(error: OSError) -> NoReturn:
    """Raise the error, as `os.fwalk` does not by default."""
    raise error
