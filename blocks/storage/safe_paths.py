"""Files below a directory that sandboxed code writes to: no link that it left there leads the host anywhere else."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ...sandbox.errors import VolumeError
from ...sandbox.wire.names import OWN_FILE_PREFIX


def split_path(path: str) -> tuple[str, ...]:
    """The names on the way to a relative path. Raises VolumeError for one that leads out."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise VolumeError(f"{path!r} is no path below the directory: name a file in it, without '..'")
    return pure.parts


def open_directory_below(root: Path, names: tuple[str, ...], make: int | None = None) -> int:
    """A descriptor of the directory at these names below `root`, reached without following any link.

    With `make`, a mode, directories that are not there are made, and belong to the owner of `root`. Raises OSError.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(at)
        for name in names:
            if make is not None:
                _make_directory(name, at, owner, make)
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def open_file_below(root: Path, path: str, flags: int, mode: int = 0o644) -> int:
    """A descriptor of the file at a path below `root`, reached without following any link.

    With O_CREAT the directories on the way are made, and what is made belongs to the owner of `root`. Raises
    VolumeError for a path that leads out, OSError for everything else.
    """
    names = split_path(path)
    at = open_directory_below(root, names[:-1], 0o755 if flags & os.O_CREAT else None)
    try:
        if not flags & os.O_CREAT:
            return os.open(names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        with suppress(FileExistsError):
            file = os.open(names[-1], flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
            _give_to_owner(names[-1], at, os.stat(root))
            return file
        if flags & os.O_EXCL:
            raise FileExistsError(17, os.strerror(17), path)
        flags &= ~os.O_CREAT
        return os.open(names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def _make_directory(name: str, at: int, owner: os.stat_result, mode: int) -> None:
    try:
        os.mkdir(name, mode & 0o777, dir_fd=at)
    except FileExistsError:
        return
    _give_to_owner(name, at, owner)
    if mode & ~0o777:  # which mkdir does not set
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            os.fchmod(folder, mode)
        finally:
            os.close(folder)


def _give_to_owner(name: str, at: int, owner: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)


def write_file_below(root: Path, path: str, data: bytes) -> None:
    """Writes a file below `root`. Raises VolumeError."""
    try:
        with open(open_file_below(root, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
    except OSError as error:
        raise VolumeError(f"{path} could not be written: {error.strerror or error}") from error


def replace_file_below(root: Path, path: str, data: bytes, folder_mode: int, file_mode: int) -> None:
    """Writes a file below `root` under another name, which it gives up for its own when it is complete.

    Raises VolumeError; nothing is left of the file then.
    """
    names = split_path(path)
    partial = f"{OWN_FILE_PREFIX}-{os.urandom(8).hex()}.partial"
    at = -1
    try:
        at = open_directory_below(root, names[:-1], folder_mode)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o600, dir_fd=at), "wb") as file:
            try:
                _give_to_owner(partial, at, os.stat(root))
                os.fchmod(file.fileno(), file_mode)
                file.write(data)
                file.flush()
                os.rename(partial, names[-1], src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                os.unlink(partial, dir_fd=at)
                raise
    except OSError as error:
        raise VolumeError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        if at >= 0:
            os.close(at)


def read_file_below(root: Path, path: str) -> bytes:
    """A file's bytes. Raises VolumeError."""
    try:
        with open(open_file_below(root, path, os.O_RDONLY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise VolumeError(f"{path} is no file that could be read")
            return file.read()
    except OSError as error:
        what = "is a symbolic link, which is not followed" if error.errno == errno.ELOOP else error.strerror or error
        raise VolumeError(f"{path} could not be read: {what}") from error
