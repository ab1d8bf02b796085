"""A file or a directory somewhere else, which fsspec reaches: reading, writing and listing it, with readable errors."""

from __future__ import annotations

import errno
import fnmatch
import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# Where a directory is nothing but the beginning of names. To make one would make the bucket, if its name is mistyped.
OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "http", "https")
PUBLIC_SETTINGS = ("endpoint_url", "region_name", "host", "hostname", "username")  # which an error may show
PIECE_BYTES = 8 * 1024 * 1024  # of a request, where a file is read as a stream


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

    def make_directory(self) -> None:
        """Makes the directory, and sees that it can be written and listed. Raises OSError."""
        with self._translate_errors():
            if not self._is_store():
                self._files.makedirs(self._path, exist_ok=True)
        probe = self / f"probe-{uuid.uuid4().hex[:12]}"
        probe.write(b"rlm-batch\n")
        try:
            if probe.name not in self.list_sizes("probe-*"):
                raise OSError(errno.EIO, "what is written there is not listed")
        finally:
            with suppress(OSError):  # one who may write and not remove can have a ledger
                probe.remove()

    def write(self, data: bytes) -> None:
        """Writes the file whole; on an object store, or not at all."""
        with self._translate_errors():
            self._files.pipe_file(self._path, data)

    def write_from_file(self, path: Path) -> None:
        """The same with what a file of this machine has."""
        with self._translate_errors():
            self._files.put_file(str(path), self._path)

    def read(self) -> bytes:
        """All that the file has."""
        with self._translate_errors():
            return self._files.cat_file(self._path)

    def read_ranges(self, ranges: list[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files directly below, by their names, starts and ends in bytes, fetched at one time."""
        with self._translate_errors():
            names, starts, ends = (list(column) for column in zip(*ranges, strict=True))
            paths = [f"{self._path}/{name}" for name in names]
            return self._files.cat_ranges(paths, starts, ends, on_error="raise")

    def open(self) -> BinaryIO:
        """The file, to be read as a stream."""
        with self._translate_errors():
            file = self._files.open(self._path, "rb", block_size=PIECE_BYTES)
        return io.BufferedReader(_TranslatingFile(file, self._translate_errors))  # type: ignore[arg-type, return-value]

    def list_sizes(self, pattern: str = "*") -> dict[str, int]:
        """The names of the files directly below that match, sorted, with their sizes in bytes: one listing, made anew.

        Empty where there is no such directory.
        """
        try:
            with self._translate_errors():
                self._files.invalidate_cache(self._path)
                entries = self._files.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        names = ((item["name"].rpartition("/")[2], item) for item in entries if item["type"] == "file")
        return {
            name: item["size"] for name, item in sorted(names, key=lambda i: i[0]) if fnmatch.fnmatch(name, pattern)
        }

    def remove(self) -> None:
        """Removes the file."""
        with self._translate_errors():
            self._files.rm_file(self._path)

    def _is_store(self) -> bool:
        protocol = self._files.protocol
        return any(name in OBJECT_STORE_SCHEMES for name in ((protocol,) if isinstance(protocol, str) else protocol))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Whatever goes wrong within is an OSError with one line of text, which has no secret in it."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, describe_error(error, self._secrets)) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, describe_error(error, self._secrets)) from None
        except Exception as error:  # noqa: BLE001 - each package has types of its own, and some are no OSError
            raise OSError(errno.EIO, describe_error(error, self._secrets)) from None


class _TranslatingFile(io.RawIOBase):
    """A file of fsspec's that raises the errors of its location."""

    def __init__(self, file: Any, translate_errors: Any) -> None:
        self._file, self._translate_errors = file, translate_errors

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._translate_errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


PathOrLocation = Path | Location


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
