"""Mounts: files and directories of the host that code reads at chosen paths in a sandbox.

Sandboxes on this machine see the files themselves, so an edit is visible at once. The key of a result then depends on
paths, sizes and modification times, because reading the data could take minutes. Sandboxes on other machines get copies
of the files, and the key depends on the bytes.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ...sandbox.errors import ConfigurationError
from .source_tree import MAX_BYTES, ReadBudget, locate_source, open_source, raise_error

# Directories that the system or rlm-batch needs in the sandboxes of at least one provider.
RESERVED = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/proc", "/run", "/sbin",
    "/sys", "/usr", "/.sandboxes", "/packages", "/python", "/python-path", "/sandbox", "/scripts", "/tmp/sandbox",
    "/tmp/rlm-batch-files.zip", "/tmp/rlm-batch-python", "/tmp/rlm-batch-python-path",
)  # fmt: skip
KERNEL_DIRECTORIES = ("/dev", "/proc", "/sys")
OPEN_TO_HOST = "is a pipe, a socket, a device or the kernel's, which lead code to this machine: leave it out"


@dataclass(frozen=True)
class HostMount:
    """A file or directory of the host that sandboxes see at `target`.

    Attributes:
        device: The device number when the source was read.
        inode: The inode number when the source was read.
        digest: A hash of the content, or of names, sizes and times if nothing is uploaded.
        other_file_system: The first directory in the source that is on another file system, empty if there is none.
        files: Bytes to upload by path below the source, with a slash after a directory's path; None without upload.
    """

    target: str
    source: Path
    is_directory: bool
    device: int
    inode: int
    digest: str
    other_file_system: str = ""
    files: dict[str, bytes] | None = None

    def check_source(self) -> None:
        """Raise ConfigurationError if the source is missing or was replaced since it was read."""
        try:
            with open_source(self.source) as fd:
                status = os.fstat(fd)
        except OSError as error:
            raise ConfigurationError(
                f"mounts: {self.source} cannot be opened any more ({error.strerror or error})"
            ) from None
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            raise ConfigurationError(
                f"mounts: {self.source} was replaced during the run: run it again, and change only its "
                "contents meanwhile"
            )


def locate_mounts(mounts: Mapping[str, Any]) -> dict[str, Path]:
    """Return the host's files and directories with links resolved, by their paths in a sandbox.

    Raises:
        ConfigurationError: A path in the sandbox is reserved or overlaps another one, or a source is missing or not
            allowed.
    """
    located: dict[str, Path] = {}
    for text, source in mounts.items():
        target = _check_target(text)
        for other in located:
            if overlaps(target, other):
                raise ConfigurationError(f"mounts: {text} and {other} overlap: use separate paths")
        located[target] = _check_source(os.fspath(source))
    return located


def overlaps(path: str, other: str) -> bool:
    """Return whether two absolute paths are equal, or one contains the other."""
    one, two = PurePosixPath(path), PurePosixPath(other)
    return one.is_relative_to(two) or two.is_relative_to(one)


def resolve_volume_mount(path: str, reserved: Iterable[str], not_above: Iterable[str] = ()) -> str:
    """Return the normalized `volume_mount_path`.

    Raises:
        ConfigurationError: The volume would overlap a directory of `reserved`, or contain one of `not_above`.
    """
    mount = os.path.normpath("/" + path.lstrip("/"))
    overlaps_reserved = any(overlaps(mount, other) for other in reserved)
    if overlaps_reserved or any(Path(own).is_relative_to(mount) for own in not_above):
        raise ConfigurationError(
            f"`volume_mount_path` is {path!r}, which a sandbox needs itself: use another path, such as /data"
        )
    return mount


def read_mounts(mounts: Mapping[str, Any], *, is_uploaded: bool) -> tuple[HostMount, ...]:
    """Read the files and directories that the mounts name.

    Raises:
        ConfigurationError: A source is missing, not allowed, or cannot be read. A source contains a pipe, a socket or a
            device, through which code could reach the host. With `is_uploaded`: a source contains a link, which would
            lead nowhere in a sandbox, or the files exceed the limits of `ReadBudget`.
    """
    budget = ReadBudget("mounts") if is_uploaded else None
    located = locate_mounts(mounts)
    host_mounts: list[HostMount] = []
    for text, (target, source) in zip(mounts.values(), located.items(), strict=True):
        try:
            with open_source(source) as fd:
                path = os.path.abspath(os.path.expanduser(text))
                host_mounts.append(_read_mount(target, source, path, fd, budget))
        except OSError as error:
            raise ConfigurationError(f"mounts: {source} cannot be read: {error.strerror or error}") from None
    return tuple(host_mounts)


def _read_mount(target: str, source: Path, text: str, fd: int, budget: ReadBudget | None) -> HostMount:
    """Read an open file or directory. `text` is the path as the user wrote it."""
    status = os.fstat(fd)
    is_directory = stat.S_ISDIR(status.st_mode)
    listing = hashlib.sha256(os.fsencode(text))  # Two directories may have equal sizes and times.
    uploads: dict[str, bytes] = {}
    other_file_system = ""
    for path, entry, parent in _list_entries(fd) if is_directory else [("", status, fd)]:
        if stat.S_ISDIR(entry.st_mode):
            content = "directory"
            uploads[f"{path}/"] = b""
            if entry.st_dev != status.st_dev and not other_file_system:
                other_file_system = path
        elif stat.S_ISREG(entry.st_mode):
            content = f"{entry.st_size} {entry.st_mtime_ns}"
        elif not stat.S_ISLNK(entry.st_mode):
            raise ConfigurationError(f"mounts: {source / path} {OPEN_TO_HOST}")
        elif budget is not None:
            raise ConfigurationError(
                f"mounts: {source / path} is a symbolic link, which cannot be uploaded: name its "
                "target, or a copy without links (cp -rL)"
            )
        else:
            content = os.readlink(os.path.basename(path), dir_fd=parent)
        listing.update(os.fsencode(f"{path}\0{content}\0"))
    mount = HostMount(
        target, source, is_directory, status.st_dev, status.st_ino, listing.hexdigest(), other_file_system
    )
    if budget is None:
        return mount
    if is_directory:
        uploads |= budget.read_files(fd, source)
    else:
        budget.spend(source, status.st_size)
        with open(fd, "rb", closefd=False) as file:
            uploads[""] = file.read(MAX_BYTES + 1)
    return replace(mount, digest=_digest_contents(uploads), files=uploads)


def _digest_contents(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\0".encode())
    return digest.hexdigest()


def _list_entries(directory: int) -> Iterator[tuple[str, os.stat_result, int]]:
    """Yield all entries below an open directory in a fixed order: path, status, and the parent's descriptor."""
    for folder, subfolders, names, parent in os.fwalk(".", dir_fd=directory, onerror=raise_error):
        subfolders.sort()
        for name in sorted((*subfolders, *names)):
            yield os.path.normpath(f"{folder}/{name}"), os.stat(name, dir_fd=parent, follow_symlinks=False), parent


def _check_target(text: Any) -> str:
    """Return the normalized path in a sandbox. Raises ConfigurationError if it is invalid or reserved."""
    is_path = isinstance(text, str) and text.startswith("/") and text.isprintable()
    if not is_path or ".." in text.split("/"):
        raise ConfigurationError(f"mounts: {text!r} is not an absolute path in a sandbox: use one such as /data/set")
    target = os.path.normpath("/" + text.lstrip("/"))
    if any(overlaps(target, other) for other in RESERVED):
        raise ConfigurationError(f"mounts: {text} is used by the sandbox itself: use another path, such as /data/set")
    return target


def _check_source(text: str) -> Path:
    """Return the host's file or directory with links resolved. Raises ConfigurationError if it cannot be mounted."""
    source = locate_source(text, "mounts")
    is_of_kernel = any(source.is_relative_to(kernel) for kernel in KERNEL_DIRECTORIES)
    if is_of_kernel or not (source.is_dir() or source.is_file()):
        raise ConfigurationError(f"mounts: {source} {OPEN_TO_HOST}")
    if Path(os.path.realpath(tempfile.gettempdir())).is_relative_to(source):
        raise ConfigurationError(
            f"mounts: {source} contains this machine's temporary files, with other sandboxes' folders: "
            "name a directory in it"
        )
    return source
