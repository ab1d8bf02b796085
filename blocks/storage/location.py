"""A file or a directory, of this machine or one that fsspec reaches: reading and writing it, with readable errors."""

import errno
import fnmatch
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Where a directory is nothing but the beginning of names. To make one would make the bucket, if its name is mistyped.
OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "http", "https")
PUBLIC_SETTINGS = ("endpoint_url", "region_name", "host", "hostname", "username")  # which an error may show


@dataclass(frozen=True)
class Location:
    """A file or a directory that fsspec reaches. Its text can be given as a location again, and has no secret.

    Its methods raise OSError, with a text for people in `strerror`; where there is no such file, FileNotFoundError.
    """

    text: str
    file_system: Any = field(repr=False, compare=False)  # as fsspec has it
    path: str = field(repr=False, compare=False)
    secrets: tuple[str, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Location":
        return Location(f"{self.text}/{name}", self.file_system, f"{self.path}/{name}", self.secrets)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.text.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """What the name ends with, from its last dot on."""
        return Path(self.name).suffix

    def make_directory(self) -> None:
        """Makes the directory, and sees that it can be written and listed. Raises OSError."""
        if self._has_directories:
            self._call(self.file_system.makedirs, self.path, exist_ok=True)
        probe = self / f"probe-{uuid.uuid4().hex[:12]}"
        probe.write(b"rlm-batch\n")
        try:
            if probe.name not in self.list_sizes("probe-*"):
                raise OSError(errno.EIO, "what is written there is not listed")
        finally:
            with suppress(OSError):  # one who may write and not remove can have a ledger
                self._call(self.file_system.rm_file, probe.path)

    @property
    def _has_directories(self) -> bool:
        """Whether a directory is something of its own there."""
        protocol = self.file_system.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        return protocols.isdisjoint(OBJECT_STORE_SCHEMES)

    def write(self, data: bytes) -> None:
        """Writes the file whole; on an object store, or not at all."""
        self._call(self.file_system.pipe_file, self.path, data)

    def upload(self, path: Path) -> None:
        """The same with what a file of this machine has."""
        self._call(self.file_system.put_file, str(path), self.path)

    def upload_directory(self, path: Path) -> None:
        """Makes this a directory with the files that one of this machine has, and those below it."""
        for file in sorted(item for item in path.rglob("*") if item.is_file()):
            target = f"{self.path}/{file.relative_to(path).as_posix()}"
            if self._has_directories:
                self._call(self.file_system.makedirs, target.rpartition("/")[0], exist_ok=True)
            self._call(self.file_system.put_file, str(file), target)

    def remove_directory(self) -> None:
        """Removes the directory, with all that is below it."""
        self._call(self.file_system.rm, self.path, recursive=True)

    def has_files(self) -> bool:
        """Whether there is any file below this directory."""
        self._call(self.file_system.invalidate_cache, self.path)
        return bool(self._call(self.file_system.find, self.path))

    def read_bytes(self) -> bytes:
        """All that the file has."""
        return self._call(self.file_system.cat_file, self.path)

    def read_ranges(self, ranges: list[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files directly below, by their names, starts and ends in bytes, fetched at one time."""
        names, starts, ends = (list(column) for column in zip(*ranges, strict=True))
        paths = [f"{self.path}/{name}" for name in names]
        return self._call(self.file_system.cat_ranges, paths, starts, ends, on_error="raise")

    def download(self, path: Path) -> None:
        """Copies the file to one of this machine, a piece at a time."""
        self._call(self.file_system.get_file, self.path, str(path))

    def list_sizes(self, pattern: str = "*") -> dict[str, int]:
        """The names of the files directly below that match, sorted, with their sizes in bytes: one listing, made anew.

        Empty where there is no such directory.
        """
        try:
            self._call(self.file_system.invalidate_cache, self.path)
            entries = self._call(self.file_system.ls, self.path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {item["name"].rpartition("/")[2]: item["size"] for item in entries if item["type"] == "file"}
        return {name: size for name, size in sorted(sizes.items()) if fnmatch.fnmatch(name, pattern)}

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the function returns. Whatever it raises is an OSError with one line of text, which has no secret."""
        try:
            return function(*arguments, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, describe_error(error, self.secrets)) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, describe_error(error, self.secrets)) from None
        except Exception as error:  # noqa: BLE001 - each package has types of its own, and some are no OSError
            raise OSError(errno.EIO, describe_error(error, self.secrets)) from None


PathOrLocation = Path | Location


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to: it replaces `path` when the block ends, and is gone after an error."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: PathOrLocation, data: bytes | Iterable[bytes]) -> None:
    """Writes a file whole or not at all, with the directories above it; pieces are not held together. Raises OSError.

    On this machine it is written beside its place and renamed. At a location that is no object store a reader may see
    a part of it while it is written.
    """
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as partial, partial.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
    elif isinstance(data, bytes):
        path.write(data)
    else:
        with tempfile.NamedTemporaryFile(prefix="rlm-batch-copy-") as file:
            file.writelines(data)
            file.flush()
            path.upload(Path(file.name))


def iterate_lines(path: PathOrLocation) -> Iterator[bytes]:
    """The lines of a file, each with its end, as a stream: of a copy, if it is at a location. Raises OSError."""
    if isinstance(path, Path):
        with path.open("rb") as file:
            yield from file
        return
    with tempfile.TemporaryDirectory(prefix="rlm-batch-copy-") as folder:
        path.download(Path(folder, "file"))
        descriptor = os.open(Path(folder, "file"), os.O_RDONLY)
    with open(descriptor, "rb") as file:  # it has no name any more: a process that is killed leaves nothing
        yield from file


def list_names(directory: PathOrLocation, pattern: str) -> list[str]:
    """The names of the files directly below that match, sorted; empty where there is no directory. Raises OSError."""
    if isinstance(directory, Location):
        return list(directory.list_sizes(pattern))
    return sorted(path.name for path in directory.glob(pattern))


def collect_secrets(settings: Any, name: str = "") -> Iterator[str]:
    """Every text in a block's settings that an error must not have: which of them are secret is not said there."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from collect_secrets(value, str(key))
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from collect_secrets(value, name)
    elif isinstance(settings, (str, bytes)) and name not in PUBLIC_SETTINGS and len(settings) > 3:
        yield settings if isinstance(settings, str) else settings.decode("utf-8", "replace")


def describe_error(error: BaseException, secrets: tuple[str, ...]) -> str:
    """What the error says, in one line. Its frames are let go: some of fsspec's hold it, and all above them with it."""
    error.__traceback__ = None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    text = next((line.strip() for line in text.splitlines() if line.strip()), "") or type(error).__name__
    for secret in secrets:
        text = text.replace(secret, "***")
    return text[:300].rstrip(". ")
