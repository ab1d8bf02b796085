"""Files and directories on this machine or in a store that fsspec reaches, with readable errors."""

import errno
import fnmatch
import os
import re
import shutil
import tempfile
import threading
import urllib.parse
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ...sandbox.errors import ConfigurationError

# Stores in which a directory is only a prefix of names. Creating one could create a bucket with a mistyped name.
OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "http", "https")
LOCAL_SCHEMES = ("file", "local")  # Schemes of paths on this machine.
SCHEME_PATTERN = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
# A location whose slashes are missing, as in the text of `Path("s3://bucket")`, or a chain of locations.
MALFORMED = re.compile(
    rf"({'|'.join((*OBJECT_STORE_SCHEMES, *LOCAL_SCHEMES, 'sftp', 'ssh', 'smb', 'block'))}):|.*::.*://", re.IGNORECASE
)
MAX_ERROR_CHARACTERS = 300
MIN_SECRET_CHARACTERS = 4  # A shorter text would hide parts of ordinary words.
PUBLIC_SETTINGS = ("endpoint_url", "region_name", "host", "hostname", "username")  # Errors may show these.


@dataclass(frozen=True)
class Location:
    """A file or a directory that fsspec reaches. `str` of it has no secret, and parsing that gives the same location.

    Its methods raise OSError with a readable `strerror`, or FileNotFoundError for a missing file.
    """

    text: str
    file_system: Any = field(repr=False, compare=False)  # an fsspec file system
    path: str = field(repr=False, compare=False)
    secrets: tuple[str, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Location":
        return Location(f"{self.text}/{name}", self.file_system, f"{self.path}/{name}", self.secrets)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.text.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the end of the name from its last dot."""
        return Path(self.name).suffix

    def make_directory(self) -> None:
        """Create the directory, and check that files can be written in it. Raises OSError."""
        protocol = self.file_system.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if protocols.isdisjoint(OBJECT_STORE_SCHEMES):
            self._call(self.file_system.makedirs, self.path, exist_ok=True)
        probe = self / f"probe-{uuid.uuid4().hex[:12]}"
        probe.write(b"rlm-batch\n")
        with suppress(OSError):  # The store may forbid deletion, which a ledger does not need.
            self._call(self.file_system.rm_file, probe.path)

    def write(self, data: bytes) -> None:
        """Write the whole file. On an object store the write is atomic."""
        self._call(self.file_system.pipe_file, self.path, data)

    def upload(self, path: Path) -> None:
        """Upload a file of this machine to this location."""
        self._call(self.file_system.put_file, str(path), self.path)

    def upload_directory(self, path: Path) -> None:
        """Upload a directory of this machine, with all files below it, to this location."""
        self._call(self.file_system.put, f"{path}/", self.path, recursive=True)

    def remove_directory(self) -> None:
        """Delete the directory and everything below it."""
        self._call(self.file_system.rm, self.path, recursive=True)

    def has_files(self) -> bool:
        """Return whether any file is below this directory."""
        self._call(self.file_system.invalidate_cache, self.path)
        return bool(self._call(self.file_system.find, self.path))

    def read_bytes(self) -> bytes:
        """Return the file's bytes."""
        return self._call(self.file_system.cat_file, self.path)

    def download_files(self, names: list[str], folder: Path) -> None:
        """Copy the named files of this directory to a folder of this machine, all at once."""
        copies = [str(folder / name) for name in names]
        self._call(self.file_system.get, [f"{self.path}/{name}" for name in names], copies)

    def download(self, path: Path) -> None:
        """Copy the file to this machine in pieces."""
        self._call(self.file_system.get_file, self.path, str(path))

    def list_sizes(self, pattern: str = "*") -> dict[str, int]:
        """Return the sizes in bytes of this directory's files that match the pattern, sorted by name.

        A missing directory has no files. This makes one request, without fsspec's cache.
        """
        try:
            self._call(self.file_system.invalidate_cache, self.path)
            entries = self._call(self.file_system.ls, self.path, detail=True)
        except FileNotFoundError:
            return {}
        sizes: dict[str, int] = {}
        for entry in entries:
            name = PurePosixPath(entry["name"]).name
            if entry["type"] == "file" and fnmatch.fnmatch(name, pattern):
                sizes[name] = entry["size"]
        return dict(sorted(sizes.items()))

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the function and return its result. Turn any error into an OSError with one line and no secrets."""
        try:
            return function(*arguments, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, describe_error(error, self.secrets)) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, describe_error(error, self.secrets)) from None
        except Exception as error:  # noqa: BLE001 - each package has its error types, and some are not OSError
            raise OSError(errno.EIO, describe_error(error, self.secrets)) from None


PathOrLocation = Path | Location


class LocalMirror:
    """Copies on this machine of the files below a location.

    The copies are in a temporary directory, which is deleted with this object.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    @cached_property
    def folder(self) -> Path:
        """Return the directory of the copies, created at the first call."""
        folder = Path(tempfile.mkdtemp(prefix="rlm-batch-copies-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def refresh(self, pattern: str) -> list[Path]:
        """Fetch the matching files that are new or have another size, and return the sorted paths of their copies.

        Raises OSError.
        """
        with self._lock:
            sizes = self._location.list_sizes(pattern)
            changed = {name: size for name, size in sizes.items() if self._sizes.get(name) != size}
            if changed:
                self._location.download_files(list(changed), self.folder)
                self._sizes |= changed
            return [self.folder / name for name in sizes]


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents, which other users cannot read. Raises OSError."""
    for directory in (*reversed(path.parents), path):
        directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to. It replaces `path` when the block ends, and is deleted on an error."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: PathOrLocation, data: bytes | Iterable[bytes]) -> None:
    """Write a whole file. Raises OSError.

    On this machine the write is atomic and creates missing directories, and only this user can read the file. At a
    location other than an object store, a reader may see a part of the file during the write.

    Args:
        path: The file.
        data: The bytes, or an iterator of pieces. The pieces are not kept in memory together.
    """
    if isinstance(path, Path):
        make_private_directory(path.parent)
        with replace_atomically(path) as partial:
            partial.touch(mode=0o600)
            with partial.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
    elif isinstance(data, bytes):
        path.write(data)
    else:
        with tempfile.NamedTemporaryFile(prefix="rlm-batch-copy-") as file:
            file.writelines(data)
            file.flush()
            path.upload(Path(file.name))


def iterate_lines(path: PathOrLocation) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. A file at a location is downloaded first. Raises OSError."""
    if isinstance(path, Path):
        with path.open("rb") as file:
            yield from file
        return
    with tempfile.TemporaryFile() as file:  # The file has no name, so a killed process leaves nothing.
        path.download(Path(f"/dev/fd/{file.fileno()}"))
        yield from file


def list_names(directory: PathOrLocation, pattern: str) -> list[str]:
    """Return the sorted names of a directory's files that match the pattern. Raises OSError.

    A missing directory has no files.
    """
    if isinstance(directory, Location):
        return list(directory.list_sizes(pattern))
    return sorted(path.name for path in directory.glob(pattern))


def collect_secrets(settings: Any, name: str = "") -> Iterator[str]:
    """Yield every text in a storage block's settings, or in the value of the setting `name`, that may be a secret."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from collect_secrets(value, str(key))
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from collect_secrets(value, name)
    elif isinstance(settings, bytes):
        yield from collect_secrets(settings.decode("utf-8", "replace"), name)
    elif isinstance(settings, str) and name not in PUBLIC_SETTINGS and len(settings) >= MIN_SECRET_CHARACTERS:
        yield settings


def describe_error(error: BaseException, secrets: tuple[str, ...]) -> str:
    """Return the error's message in one line, without secrets.

    The traceback is dropped, because some frames of fsspec refer to the error and keep all their callers alive.
    """
    error.__traceback__ = None
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    lines = text.strip().splitlines() or [type(error).__name__]
    line = lines[0].strip()
    for secret in secrets:
        line = line.replace(secret, "***")
    return line[:MAX_ERROR_CHARACTERS].rstrip(". ")


def parse_scheme(text: str) -> str | None:
    """Return the scheme of a location, such as `s3`, or None for a path.

    Raises:
        ConfigurationError: The text is a chain of locations, lacks slashes, or contains a password.
    """
    match = SCHEME_PATTERN.match(text)
    if match is None:
        if MALFORMED.match(text):
            raise ConfigurationError(
                f"{text!r} is not a location: write a text such as s3://bucket/dir or file:///dir, because a Path "
                f"drops slashes, or ./{text} for a file of that name"
            )
        return None
    user, at, _ = urllib.parse.urlsplit(text).netloc.rpartition("@")
    if at and ":" in user:
        raise ConfigurationError(
            f"a location of {match[1]}:// contains a password, which logs would show: save it as a block "
            "(remote-file-system), and give block://remote-file-system/NAME"
        )
    return match[1].lower()


def is_remote(text: object) -> bool:
    """Return whether this is the text of a location and not a path on this machine. Raises ConfigurationError."""
    return isinstance(text, str) and parse_scheme(text) not in (None, *LOCAL_SCHEMES)


def locate_local(text: str, name: str) -> Path:
    """Return the absolute path of a directory or file of this machine.

    Raises:
        ConfigurationError: The text is a location elsewhere, or a relative path after `file://`. The error says `name`.
    """
    if is_remote(text):
        raise ConfigurationError(f"{name} is {text}, and must be a directory of this machine")
    path = text
    if parse_scheme(text) is not None:
        _, _, path = text.partition("://")
        if not path.startswith("/"):
            raise ConfigurationError(f"{text} is not an absolute path: use three slashes, as in file:///data/results")
    return Path(path).expanduser().absolute()


def get_data_dir() -> Path:
    """Return rlm-batch's directory in the user's data directory."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(data):
        return Path(data, "rlm-batch")
    return Path.home() / ".local" / "share" / "rlm-batch"


def resolve_data_dir(subdirectory: str, variable: str) -> Path:
    """Return the directory that an environment variable names, or by default the subdirectory of `get_data_dir()`."""
    named = os.environ.get(variable)
    return locate_local(named, variable) if named else get_data_dir() / subdirectory
