"""Access to files below a directory that sandboxed code writes to, without following links that the code created."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...sandbox.errors import VolumeError
from ...sandbox.sandbox_api import describe_large_file, describe_special_file
from ...sandbox.wire.names import OWN_FILE_PREFIX


def split_path(path: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Split the path of a file below a directory into its names. Raises VolumeError for a path outside the directory.

    With `may_be_empty`, the path may also be that of the directory, and then the tuple is empty.
    """
    names = tuple(name for name in path.split("/") if name not in ("", "."))
    is_outside = path.startswith("/") or ".." in names or "\0" in path
    if is_outside or (not names and not may_be_empty):
        raise VolumeError(f"{path!r} is not a path below the directory: name a file in it, without '..'")
    return names


@contextmanager
def enter_directory_below(root: Path, names: tuple[str, ...], mode: int | None = None) -> Iterator[int]:
    """Yield a descriptor of the directory at these names below `root`, opened without following links.

    If `mode` is not None, missing directories are created with this mode and the owner of `root`. Raises OSError.
    """
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(directory)
        for name in names:
            if mode is not None:
                _make_directory(name, directory, owner, mode)
            child = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = child
            is_closed = not os.fstat(directory).st_mode & stat.S_IXUSR
            if mode is not None and is_closed:  # The kernel would not refuse root.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield directory
    finally:
        os.close(directory)


def _make_directory(name: str, parent: int, owner: os.stat_result, mode: int) -> None:
    try:
        os.mkdir(name, mode & 0o777, dir_fd=parent)
    except FileExistsError:
        return
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        _give_to_owner(folder, owner)
        if mode & ~0o777:  # `mkdir` ignores these bits.
            os.fchmod(folder, mode)
    finally:
        os.close(folder)


def _give_to_owner(descriptor: int, owner: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


@contextmanager
def convert_errors(path: str, action: str) -> Iterator[None]:
    """Turn an OSError into a VolumeError that names the path and the action, such as "read"."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise VolumeError(describe_special_file(path, is_link=True)) from error
        raise VolumeError(f"{path} could not be {action}: {error.strerror or error}") from error


def replace_file_below(root: Path, path: str, data: bytes, folder_mode: int, file_mode: int) -> None:
    """Write a file below `root` under a temporary name, and rename it when it is complete.

    Create missing directories. New entries belong to the owner of `root`. If writing fails, delete the temporary file
    and raise VolumeError.
    """
    names = split_path(path)
    partial = f"{OWN_FILE_PREFIX}-{os.urandom(8).hex()}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        convert_errors(path, "written"),
        enter_directory_below(root, names[:-1], folder_mode) as at,
        open(os.open(partial, flags, 0o600, dir_fd=at), "wb") as file,
    ):
        try:
            _give_to_owner(file.fileno(), os.stat(root))
            os.fchmod(file.fileno(), file_mode)
            file.write(data)
            file.flush()
            os.rename(partial, names[-1], src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(partial, dir_fd=at)
            raise


def read_file_below(root: Path, path: str, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a file below `root`. Raises VolumeError, also for a file of more than `max_bytes`."""
    names = split_path(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with (
        convert_errors(path, "read"),
        enter_directory_below(root, names[:-1]) as at,
        open(os.open(names[-1], flags, dir_fd=at), "rb") as file,
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise VolumeError(describe_special_file(path))
        if max_bytes is None:
            return file.read()
        size = status.st_size
        if size <= max_bytes:
            data = file.read(size + 1)  # `read(n)` allocates n bytes at once.
            if len(data) > size:  # Code is extending the file.
                data += file.read(max_bytes + 1 - len(data))
            if len(data) <= max_bytes:
                return data
            size = len(data)
        raise VolumeError(describe_large_file(path, size, max_bytes))
