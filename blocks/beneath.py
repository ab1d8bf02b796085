"""Files below a directory that sandboxed code writes to: no link that it left there leads the host anywhere else."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ..sandbox.errors import VolumeError


def parts(path: str) -> tuple[str, ...]:
    """The names on the way to a relative path. Raises VolumeError for one that leads out."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise VolumeError(f"{path!r} is no path below the directory: name a file in it, without '..'")
    return pure.parts


def open_beneath(root: Path, path: str, flags: int, mode: int = 0o644) -> int:
    """A descriptor of the file at a path below `root`, reached without following any link.

    With O_CREAT the directories on the way are made, and what is made belongs to the owner of `root`. Raises
    VolumeError for a path that leads out, OSError for everything else.
    """
    names = parts(path)
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(at)
        for name in names[:-1]:
            if flags & os.O_CREAT:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                    _give(name, at, owner)
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        if not flags & os.O_CREAT:
            return os.open(names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        with suppress(FileExistsError):
            file = os.open(names[-1], flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
            _give(names[-1], at, owner)
            return file
        if flags & os.O_EXCL:
            raise FileExistsError(17, os.strerror(17), path)
        flags &= ~os.O_CREAT
        return os.open(names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def _give(name: str, at: int, owner: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)


def write_beneath(root: Path, path: str, data: bytes) -> None:
    """Writes a file below `root`. Raises VolumeError."""
    try:
        with open(open_beneath(root, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
    except OSError as error:
        raise VolumeError(f"{path} could not be written: {error.strerror or error}") from error


def read_beneath(root: Path, path: str) -> bytes:
    """A file's bytes. Raises VolumeError."""
    try:
        with open(open_beneath(root, path, os.O_RDONLY), "rb") as file:
            return file.read()
    except OSError as error:
        raise VolumeError(f"{path} could not be read: {error.strerror or error}") from error
