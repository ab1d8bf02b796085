"""Where results and inputs may be: a path on this machine, a location that fsspec knows, or one through a saved block.

`s3://bucket/dir`, `gs://`, `sftp://` and whatever else fsspec has a package for; `file:///dir` is a path like any
other; `block://<slug>/<name>/<path below>` is below the base path of one of Prefect's storage blocks, with that block's
credentials. fsspec is imported when there is such a location, and not before.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import shutil
import tempfile
import threading
import urllib.parse
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...sandbox.errors import ConfigurationError

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
HERE = ("file", "local")  # the schemes of this machine's own paths
# Where a directory is nothing but the beginning of names. To make one would make the bucket, if its name is mistyped.
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "http", "https")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "sftp": "paramiko", "ssh": "paramiko"}
PACKAGES |= {"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "smb": "smbprotocol"}
OPEN = ("endpoint_url", "region_name", "host", "hostname", "username")  # settings that an error may name
AT_ONCE = 32 * 1024 * 1024  # bytes that are fetched together, where they are of several files
BLOCK = 8 * 1024 * 1024  # bytes of a request, where a file is read as a stream


class Location:
    """A file or a directory that fsspec reaches. Its text can be given as a location again, and has no secret.

    Its methods raise OSError, with a text for people in `strerror`; where there is no such file, FileNotFoundError.
    """

    def __init__(self, files: Any, path: str, text: str, secrets: tuple[str, ...] = ()) -> None:
        self._files = files  # the file system, as fsspec has it
        self._path = path.rstrip("/")
        self._text = text.rstrip("/")
        self._secrets = secrets

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Location({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str) -> Location:
        return Location(self._files, f"{self._path}/{name}", f"{self._text}/{name}", self._secrets)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._text.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """What the name ends with, from its last dot on."""
        return Path(self.name).suffix

    def prepare(self) -> None:
        """Makes the directory, and sees that it can be written and listed. Raises OSError."""
        with self._told():
            if not self._is_store():
                self._files.makedirs(self._path, exist_ok=True)
        probe = self / f"probe-{uuid.uuid4().hex[:12]}"
        probe.write(b"rlm-batch\n")
        try:
            if probe.name not in self.sizes("probe-*"):
                raise OSError(errno.EIO, "what is written there is not listed")
        finally:
            with suppress(OSError):  # one who may write and not remove can have a ledger
                probe.remove()

    def write(self, data: bytes) -> None:
        """Writes the file whole; on an object store, or not at all."""
        with self._told():
            self._files.pipe_file(self._path, data)

    def write_from(self, path: Path) -> None:
        """The same with what a file of this machine has."""
        with self._told():
            self._files.put_file(str(path), self._path)

    def read(self) -> bytes:
        """All that the file has."""
        with self._told():
            return self._files.cat_file(self._path)

    def read_ranges(self, wanted: list[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files directly below, by their names, starts and ends in bytes, fetched at one time."""
        with self._told():
            names, starts, ends = (list(column) for column in zip(*wanted, strict=True))
            paths = [f"{self._path}/{name}" for name in names]
            return self._files.cat_ranges(paths, starts, ends, on_error="raise")

    def open(self) -> BinaryIO:
        """The file, to be read as a stream."""
        with self._told():
            file = self._files.open(self._path, "rb", block_size=BLOCK)
        return io.BufferedReader(_Told(file, self._told))  # type: ignore[arg-type, return-value]

    def sizes(self, pattern: str = "*") -> dict[str, int]:
        """The names of the files directly below that match, sorted, with their sizes in bytes: one listing, made anew.

        Empty where there is no such directory.
        """
        try:
            with self._told():
                self._files.invalidate_cache(self._path)
                found = self._files.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        names = ((item["name"].rpartition("/")[2], item) for item in found if item["type"] == "file")
        return {
            name: item["size"] for name, item in sorted(names, key=lambda i: i[0]) if fnmatch.fnmatch(name, pattern)
        }

    def remove(self) -> None:
        """Removes the file."""
        with self._told():
            self._files.rm_file(self._path)

    def _is_store(self) -> bool:
        protocol = self._files.protocol
        return any(name in STORES for name in ((protocol,) if isinstance(protocol, str) else protocol))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever goes wrong within is an OSError with one line of text, which has no secret in it."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, _line(error, self._secrets)) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, _line(error, self._secrets)) from None
        except Exception as error:  # noqa: BLE001 - each package has types of its own, and some are no OSError
            raise OSError(errno.EIO, _line(error, self._secrets)) from None


class _Told(io.RawIOBase):
    """A file of fsspec's, whose errors are told as those of its location are."""

    def __init__(self, file: Any, told: Any) -> None:
        self._file, self._as_told = file, told

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._as_told():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


Place = Path | Location
# Those that somebody has: who asks again gets the same, and no server is asked for its block again meanwhile.
_held: weakref.WeakValueDictionary[str, Location] = weakref.WeakValueDictionary()


class Copies:
    """Copies on this machine of the files below a location, brought up to date as they grow there.

    They are in a temporary directory, which goes when nobody has this object any more.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._sizes: dict[str, int] = {}

    @property
    def folder(self) -> Path:
        """Where they are."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rlm-batch-copies-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def refresh(self, pattern: str) -> list[Path]:
        """The copies of the files that match, sorted; what is new is fetched, and nothing else. Raises OSError.

        One listing, and a request for each file that has grown.
        """
        with self._lock:
            sizes = self._location.sizes(pattern)
            wanted: list[tuple[str, int, int]] = []
            for name, size in sizes.items():
                start = self._sizes.get(name, 0)
                while start < size:  # no more than a bounded piece of a file at one time
                    wanted.append((name, start, min(size, start + BLOCK)))
                    start += BLOCK
            for group in _groups(wanted):
                for (name, start, _), data in zip(group, self._location.read_ranges(group), strict=True):
                    if start != self._sizes.get(name, 0):
                        continue  # it was cut short since it was listed
                    with open(self.folder / name, "ab") as file:
                        file.truncate(start)
                        file.write(data)
                    self._sizes[name] = start + len(data)
            return [self.folder / name for name in sizes if name in self._sizes]

    def whole(self) -> Path:
        """The copy of the location itself, which is a file. Raises OSError."""
        with self._lock:
            if "" not in self._sizes:
                with self._location.open() as source, open(self.folder / "file", "wb") as file:
                    shutil.copyfileobj(source, file, BLOCK)
                    self._sizes[""] = file.tell()
        return self.folder / "file"


def _groups(wanted: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    group: list[tuple[str, int, int]] = []
    held = 0
    for item in wanted:
        size = item[2] - item[1]
        if group and held + size > AT_ONCE:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


def located(text: str | os.PathLike[str] | Location) -> Place:
    """The path or the location that the text stands for; a path is made absolute. Raises ConfigurationError."""
    if isinstance(text, Location):
        return text
    text = os.fspath(text)
    if (known := _held.get(text)) is not None:
        return known
    scheme = scheme_of(text)
    if scheme is None:
        return Path(text).expanduser().absolute()
    if scheme in HERE:
        return _here(text)
    found = _of_block(text) if scheme == "block" else _reached(text, text, {})
    if isinstance(found, Location):
        _held[text] = found
    return found


def scheme_of(text: str) -> str | None:
    """The scheme of a location, such as `s3`; None of a path. Raises ConfigurationError for what is neither."""
    found = SCHEME.match(text)
    if found is None:
        if "::" in text.partition("://")[0] and "://" in text:
            raise ConfigurationError(f"{text} is several locations in one: give one, such as s3://bucket/dir")
        return None
    if "@" in (authority := urllib.parse.urlsplit(text).netloc) and ":" in authority.rpartition("@")[0]:
        raise ConfigurationError(
            f"a location of {found[1]}:// has a password in it, which would stand in logs: save it as a block "
            "(remote-file-system), and give block://remote-file-system/NAME"
        )
    return found[1].lower()


def is_remote(text: object) -> bool:
    """Whether that is the text of a location which is not simply a path of this machine. Raises ConfigurationError."""
    return isinstance(text, str) and scheme_of(text) not in (None, *HERE)


def absolute(text: str) -> str:
    """The text with which another directory's process finds the same place; a location stays as it is."""
    return text if is_remote(text) else str(located(text))


def write(place: Place, data: bytes | Iterable[bytes]) -> None:
    """Writes a file whole or not at all, with the directories above it; pieces are not held together. Raises OSError.

    On this machine it is written beside its place and renamed. At a location that is no object store a reader may see
    a part of it while it is written.
    """
    pieces: Iterable[bytes] = [data] if isinstance(data, bytes) else data
    if isinstance(place, Location):
        if isinstance(data, bytes):
            place.write(data)
            return
        handle, name = tempfile.mkstemp(prefix="rlm-batch-copy-")
        try:
            with open(handle, "wb") as file:
                file.writelines(pieces)
            place.write_from(Path(name))
        finally:
            os.unlink(name)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(pieces)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


def read(place: Place) -> bytes:
    """All that a file has. Raises OSError."""
    return place.read() if isinstance(place, Location) else place.read_bytes()


def lines(place: Place) -> Iterator[bytes]:
    """The lines of a file, each with its end, as a stream. Raises OSError."""
    with place.open() if isinstance(place, Location) else place.open("rb") as file:
        yield from file


def names(place: Place, pattern: str) -> list[str]:
    """The names of the files directly below that match, sorted; empty where there is no directory. Raises OSError."""
    if isinstance(place, Location):
        return list(place.sizes(pattern))
    return sorted(path.name for path in place.glob(pattern))


def _here(text: str) -> Path:
    path = text.partition("://")[2]
    if not path.startswith("/"):
        raise ConfigurationError(f"{text} is no absolute path: it has three slashes, as in file:///data/results")
    return Path(path)


def _of_block(text: str) -> Place:
    slug, _, rest = text.partition("://")[2].partition("/")
    name, _, below = rest.partition("/")
    if not slug or not name:
        raise ConfigurationError(
            f"{text} names no block: it is block://SLUG/NAME/PATH, as in block://remote-file-system/results/job-1"
        )
    if ".." in below.split("/"):
        raise ConfigurationError(f"{text} leaves the block's base path: name what is below it")
    base, settings = _base(slug, name)
    below = below.strip("/")
    at = f"{base.rstrip('/')}/{below}" if below else base
    if scheme_of_base(base) is None:
        return Path(at).expanduser().absolute()
    return _reached(text, at, settings)


def scheme_of_base(base: str) -> str | None:
    """The scheme of a block's base path; None where that is a path of this machine."""
    found = SCHEME.match(base)
    return None if found is None else found[1].lower()


def _base(slug: str, name: str) -> tuple[str, dict[str, Any]]:
    """The base path and the settings of a storage block. Raises ConfigurationError."""
    from prefect import filesystems  # it registers Prefect's own kinds of blocks
    from prefect.blocks.core import Block

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schema that has changed
            block: Any = Block.load(f"{slug}/{name}", _sync=True)  # type: ignore[call-arg]
    except ValueError as error:
        raise ConfigurationError(
            f"there is no block {slug}/{name} that can be loaded from this Prefect server: save it in the UI"
            + ("" if "Unable to find" in str(error) else ", with the fields that this version of its kind has")
        ) from None
    except Exception as error:
        if type(error).__module__.startswith(("httpx", "httpcore")):
            raise  # the server is away, which is told by whoever needs it
        raise ConfigurationError(
            f"the block {slug}/{name} cannot be loaded here ({type(error).__name__}): is the package installed that "
            "its kind is from?"
        ) from None
    if isinstance(block, filesystems.SMB):
        block = block.filesystem
    if isinstance(block, filesystems.RemoteFileSystem):
        return block.basepath, dict(block.settings)
    if isinstance(block, filesystems.LocalFileSystem):
        return str(Path(block.basepath or ".").expanduser().absolute()), {}
    raise ConfigurationError(
        f"the block {slug}/{name} has no base path that results could be below: use one of remote-file-system or "
        "local-file-system"
    )


def _reached(text: str, at: str, settings: dict[str, Any]) -> Place:
    """The location `at`, which is called `text`. Raises ConfigurationError where it cannot be reached."""
    from upath import UPath

    secrets = (*_secrets(settings), *_secrets(urllib.parse.urlsplit(at).password))
    scheme = scheme_of_base(at) or ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of schemes that fsspec knows and universal-pathlib has no class for
            path = UPath(at, **settings)
            if path.protocol in HERE:
                return Path(path.path)
            return Location(path.fs, path.path, text, secrets)
    except ImportError as error:
        package = PACKAGES.get(scheme)
        how = f"pip install '{package}'" if package else _line(error, secrets)
        raise ConfigurationError(f"{text} needs a package that is not installed: {how}") from None
    except ValueError as error:
        if "nsupported filesystem" in str(error) or "not known" in str(error):
            raise ConfigurationError(
                f"{text}: there is no location of the kind {scheme}://; there are s3://, gs://, abfs://, sftp://, "
                "file:// and others that fsspec knows, and block://SLUG/NAME"
            ) from None
        raise ConfigurationError(f"{text} cannot be used: {_line(error, secrets)}") from None
    except Exception as error:  # noqa: BLE001 - some connect at once, and each has types of its own
        raise ConfigurationError(f"{text} cannot be reached: {_line(error, secrets)}") from None


def _secrets(settings: Any, name: str = "") -> Iterator[str]:
    """Every text in a block's settings that an error must not have: which of them are secret is not said there."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _secrets(value, str(key))
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from _secrets(value, name)
    elif isinstance(settings, (str, bytes)) and name not in OPEN and len(settings) > 3:
        yield settings if isinstance(settings, str) else settings.decode("utf-8", "replace")


def _line(error: BaseException, secrets: tuple[str, ...]) -> str:
    """What the error says, in one line. Its frames are let go: some of fsspec's hold it, and all above them with it."""
    error.__traceback__ = None
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    said = next((line.strip() for line in said.splitlines() if line.strip()), "") or type(error).__name__
    for secret in secrets:
        said = said.replace(secret, "***")
    return said[:300].rstrip(". ")
