"""Files of inputs in CSV and JSON, each checked once as a whole and then read value by value."""

import csv
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.data_frames import check_column_names
from ...sandbox.requests.json_text import JSON, RepeatedKeyError
from ...sandbox.wire.names import add_article
from .cells import READERS, ColumnType, list_fitting_types, read_cell
from .host_paths import pin_file

ProgressReport = Callable[[str], None]  # takes a line for a person
CheckNames = Callable[[Iterable[str], str], None]  # checks the names of a row's values; the text is the row's place

COMPRESSIONS = (".gz", ".zst")
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # Python has the first one from 3.14 on.
CELL_CHARACTERS = 64 * 1024 * 1024  # characters of a cell of CSV; Python's own limit is 128 KiB
OTHER_DELIMITERS = (";", "\t", "|")
# The limits on unpacked data. 65 kB of zstd, or 47 kB of Parquet, filled 4.4 GiB of memory.
UNPACKED_BYTES = 256 * 1024 * 1024
UNPACKED_RATIO = 100
PIECE_BYTES = 1024 * 1024
ALL_TYPES = list(READERS)


def split_suffix(path: PathOrLocation) -> tuple[str, str]:
    """Return the suffixes of a file's name for its format and its compression, in small letters. Both may be empty."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return Path(path.name[: len(path.name) - len(compression)]).suffix.lower(), compression


class DataFile:
    """A file that can be opened several times, and is unpacked if its name says that it is compressed.

    The file must not change after it was found. A pipe or a file at a location is copied to a temporary file.
    """

    def __init__(self, path: PathOrLocation) -> None:
        """Find the file. Raises OSError, and ConfigurationError if its data is too large for its compressed size."""
        self.path = path
        if isinstance(path, Path) and not path.is_fifo():
            self._source = pin_file(path)
        else:
            self._copy = tempfile.TemporaryFile()  # noqa: SIM115 - it is deleted with this object
            self._source = Path(f"/dev/fd/{self._copy.fileno()}")
            if isinstance(path, Location):
                path.download(self._source)
            else:
                self._source.write_bytes(pin_file(path).read_bytes())
        self._version = self._read_version()
        if split_suffix(path)[1]:
            with self.open() as stream:
                while stream.read(PIECE_BYTES):
                    check_expansion(path, stream.tell(), self._version[0])

    def _read_version(self) -> tuple[int, int]:
        status = os.stat(self._source)
        return status.st_size, status.st_mtime_ns

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file at its beginning. Raises OSError, and ConfigurationError if it changed or is damaged."""
        if self._read_version() != self._version:
            raise ConfigurationError(f"{self.path} changed after it was checked: start the run again")
        suffix = split_suffix(self.path)[1]
        try:
            with open(self._source, "rb") as file, _unpack(file, suffix) as stream:
                yield stream
        except Exception as error:
            if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) or type(error).__name__ == "ZstdError":
                raise ConfigurationError(
                    f"{self.path} is damaged, or not compressed as {suffix} says: {error}"
                ) from None
            raise

    @contextmanager
    def open_text(self) -> Iterator[io.TextIOWrapper]:
        """Open the file as text in UTF-8, or in UTF-16 with a byte order mark.

        Raises OSError, and ConfigurationError for bytes that are wrong in the encoding.
        """
        with self.open() as stream:
            encoding = "utf-16" if stream.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        try:
            with self.open() as stream, io.TextIOWrapper(stream, encoding, newline="") as text:
                yield text
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{self.path} is not text in UTF-8 ({error.reason}): "
                f"{error.object[max(0, error.start - 20) : error.start + 20]!r}. Save it as UTF-8"
            ) from None

    def read_lines(self) -> Iterator[str]:
        """Yield the lines of the text with their ends."""
        with self.open_text() as text:
            yield from text


def _unpack(stream: BinaryIO, suffix: str) -> BinaryIO:
    """Return a reader of a file's data, unpacked by the suffix of its name. Raises ConfigurationError."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if not suffix:
        return stream
    for name in ZSTD_MODULES:
        with suppress(ImportError):
            return import_module(name).open(stream)
    raise ConfigurationError("reading .zst needs backports.zstd, which is not installed: pip install 'rlm-batch[zstd]'")


def check_expansion(path: PathOrLocation, unpacked: int, size: int) -> None:
    """Raise ConfigurationError if a file of `size` bytes unpacks to too many bytes."""
    if unpacked > max(UNPACKED_BYTES, UNPACKED_RATIO * size):
        raise ConfigurationError(
            f"{path} unpacks to more than {unpacked >> 20:,} MiB, over {UNPACKED_RATIO} times its size, which would "
            "fill this machine: if you trust it, unpack it yourself"
        )


class JsonValues:
    """A file of JSON lines, or with the suffix .json of one array. A line that is not blank, or an item, is a value.

    The items of an array are kept in memory.
    """

    def __init__(self, file: DataFile, check: CheckNames | None) -> None:
        """Check the whole file. With `check`, each value must be an object, and its names are checked.

        Raises OSError, and ConfigurationError for a wrong value.
        """
        self._file = file
        self._items = self._read_array() if split_suffix(file.path)[0] == ".json" else None
        self._count = 0
        for value, where in self._read_values():
            self._count += 1
            if check is None:
                continue
            if not isinstance(value, dict):
                kind = add_article(type(value).__name__)
                raise ConfigurationError(f"{where} is {kind}, and must be an object (one array is a file NAME.json)")
            check(value, where)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (value for value, _ in self._read_values())

    def _read_array(self) -> list[Any] | None:
        """Return the items of a file that is one array, or None for JSON lines. Raises ConfigurationError."""
        with self._file.open_text() as stream:
            text = stream.read()
        try:
            value = JSON.decode(text)
        except (ValueError, RecursionError) as error:
            if str(error).startswith("Extra data"):
                return None
            raise ConfigurationError(f"{self._file.path} is not JSON: {error}") from None
        return value if isinstance(value, list) else None

    def _read_values(self) -> Iterator[tuple[Any, str]]:
        """Yield each value with its place in the file, for messages. Raises ConfigurationError."""
        if self._items is not None:
            for number, value in enumerate(self._items, 1):
                yield value, f"item {number} of {self._file.path}"
            return
        for number, line in enumerate(self._file.read_lines(), 1):
            if line.strip():
                where = f"line {number} of {self._file.path}"
                try:
                    yield JSON.decode(line), where
                except (ValueError, RecursionError) as error:
                    raise ConfigurationError(f"{where} is not JSON: {error} (one array is a file NAME.json)") from None


class CsvTable:
    """A file of CSV. Only one row at a time is in memory.

    A column has its type from `types`, otherwise `default`, otherwise the first type that fits all of its cells.
    """

    def __init__(self, file: DataFile, types: dict[str, ColumnType], default: ColumnType | None = None) -> None:
        """Check the whole file. Raises OSError, and ConfigurationError with the line for a wrong cell."""
        csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS))
        self._file, self._path = file, file.path
        self._skips_blanks = False
        first_row = next(self._read_rows(), None)
        header = [] if first_row is None else first_row[1]
        self._skips_blanks = any(name.startswith(" ") for name in header)  # The header is like "x, y".
        self.names = [name.strip() for name in header]
        self._check_names()
        self.types: dict[str, ColumnType] = {}
        for name in self.names:
            kind = types.get(name) or default
            if kind is not None:
                self.types[name] = kind
        self._count = 0
        self._read_all()

    def _check_names(self) -> None:
        """Raise ConfigurationError for a file with other delimiters, and for wrong names of columns."""
        if len(self.names) == 1:
            for delimiter in OTHER_DELIMITERS:
                if delimiter in self.names[0]:
                    raise ConfigurationError(f"{self._path} has {delimiter!r} between its cells: save it with commas")
        check_column_names(self.names, self._path)

    def _read_all(self) -> None:
        """Count the rows, check the cells of typed columns, and choose a type for each other column."""
        fitting_types: dict[str, list[ColumnType]] = {}  # keys: the columns with a cell that is not empty
        for line, row in self._read_data():
            self._count += 1
            for name, cell in zip(self.names, row, strict=True):
                if name in self.types:
                    self._check_cell(name, cell, line)
                    continue
                candidates = fitting_types.get(name, ALL_TYPES)
                text = cell.strip()
                if candidates and text:  # Empty cells fit all types.
                    fitting_types[name] = list_fitting_types(text, candidates)
        for name, candidates in fitting_types.items():
            self.types[name] = candidates[0] if candidates else "str"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, row in self._read_data():
            yield {name: read_cell(self.types.get(name), cell) for name, cell in zip(self.names, row, strict=True)}

    def _read_data(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows below the header, each with the number of its last line.

        Skip rows at the end that have several cells, all empty. Spreadsheets write such rows below a table.
        """
        rows = self._read_rows()
        next(rows, None)
        empty: list[tuple[int, list[str]]] = []
        for line, row in rows:
            if len(row) != len(self.names):
                raise ConfigurationError(
                    f"line {line} of {self._path} has {len(row)} cells, and the header has "
                    f"{len(self.names)}: {', '.join(self.names)}"
                )
            if len(row) > 1 and not "".join(row).strip():
                empty.append((line, row))
                continue
            yield from empty
            empty.clear()
            yield line, row

    def _read_rows(self) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(self._file.read_lines(), strict=True, skipinitialspace=self._skips_blanks)
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            raise ConfigurationError(f"line {reader.line_num} of {self._path} is not CSV: {error}") from None

    def _check_cell(self, name: str, cell: str, line: int) -> None:
        try:
            read_cell(self.types[name], cell)
        except ValueError as error:
            reason = error if isinstance(error, RepeatedKeyError) else f"{cell[:100]!r} is no {self.types[name]}"
            raise ConfigurationError(
                f"line {line} of {self._path}, column {name!r}: {reason}. Correct it, or read the column as another "
                f"type (--types {name}=str)"
            ) from None
