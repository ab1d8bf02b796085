"""Files of inputs in CSV and JSON, each checked once as a whole and then read value by value."""

import codecs
import csv
import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.json_text import JSON, RepeatedKeyError
from ...sandbox.wire.names import add_article
from .cells import READERS, ColumnType, list_fitting_types, read_cell

Report = Callable[[str], None]  # takes a line for a person

LARGE_BYTES = 4 * 1024 * 1024  # Reading a larger file is reported.
SPREADSHEET = (
    "a spreadsheet: save it as CSV UTF-8 there, or with pandas.read_excel(FILE).to_csv('NAME.csv', index=False)"
)
BINARY = {
    b"PK\x03\x04": SPREADSHEET,  # Spreadsheets are ZIP archives.
    b"\xd0\xcf\x11\xe0": SPREADSHEET,  # Excel wrote these until 2007.
    b"\x1f\x8b": "compressed: add .gz to its name",
    b"\x28\xb5\x2f\xfd": "compressed: add .zst to its name",
    b"PAR1": "Parquet: call it NAME.parquet",
}
COMPRESSIONS = (".gz", ".zst")
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # Python has the first one from 3.14 on.
LIST_BYTES = 64  # bytes of memory of an empty list or object
CELL_CHARACTERS = 64 * 1024 * 1024  # A cell or a line may be long, but must not fill the memory.
# Compressed data may have so many bytes, and so many times the file's size. A small file could fill the machine.
UNPACKED_BYTES = 256 * 1024 * 1024
UNPACKED_RATIO = 100
PIECE_BYTES = 1024 * 1024
OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def split_suffix(path: PathOrLocation) -> tuple[str, str]:
    """Return the suffixes of a file's name for its format and its compression, in small letters. Both may be empty."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return Path(path.name[: len(path.name) - len(compression)]).suffix.lower(), compression


class DataFile:
    """A file that can be opened several times, and is unpacked if its name says that it is compressed.

    The file must not change between. A pipe, or the copy of a file at a location, is copied to a temporary file.
    """

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Find the file. Messages name it `path`, whose suffix tells the compression.

        Raises OSError, and ConfigurationError for a compressed file that is damaged or unpacks to much.
        """
        self._source, self._path = source, path
        if isinstance(path, Location) or not source.is_file():
            self._copy = tempfile.TemporaryFile()  # noqa: SIM115  # without a name, so nothing is left of it
            with open(source, "rb") as pipe:
                shutil.copyfileobj(pipe, self._copy)
            self._copy.flush()
            self._source = Path(f"/dev/fd/{self._copy.fileno()}")
        status = self._status = os.stat(self._source)
        self.size = status.st_size
        self.most = max(UNPACKED_BYTES, UNPACKED_RATIO * self.size) if split_suffix(path)[1] else None
        if self.most is not None:
            with self.open() as stream:
                while stream.read(PIECE_BYTES):
                    if stream.tell() > self.most:
                        raise describe_expansion(path, stream.tell())

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file at its beginning. Raises OSError, and ConfigurationError if it changed or is damaged."""
        status, checked = os.stat(self._source), self._status
        if (status.st_ino, status.st_size, status.st_mtime_ns) != (
            checked.st_ino,
            checked.st_size,
            checked.st_mtime_ns,
        ):
            raise ConfigurationError(f"{self._path} changed after it was checked: start the run again")
        try:
            with open(self._source, "rb") as file, _unpack(file, self._path) as stream:
                yield stream
        except Exception as error:
            if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) or type(error).__name__ == "ZstdError":
                suffix = split_suffix(self._path)[1]
                raise ConfigurationError(
                    f"{self._path} is damaged, or not compressed as {suffix} says: {error}"
                ) from None
            raise


def _unpack(stream: BinaryIO, path: PathOrLocation) -> BinaryIO:
    """Return a reader of a file's data, unpacked if its name says that it is compressed. Raises ConfigurationError."""
    compression = split_suffix(path)[1]
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if not compression:
        return stream
    for name in ZSTD_MODULES:
        with suppress(ImportError):
            return import_module(name).open(stream)
    raise ConfigurationError(
        f"reading {path} needs backports.zstd, which is not installed: pip install 'rlm-batch[zstd]', or unpack the "
        "file with unzstd"
    )


def describe_expansion(path: PathOrLocation, size: int) -> ConfigurationError:
    """Return the error of a file whose data is too large for the file's size."""
    return ConfigurationError(
        f"{path} unpacks to more than {size >> 20:,} MiB, over {UNPACKED_RATIO} times its size, which would fill this "
        "machine: if you trust it, unpack it yourself"
    )


class TextFile:
    """A text file in UTF-8, or in UTF-16 with a byte order mark. Messages name the file `path`."""

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Find the file's encoding. Raises OSError, and ConfigurationError for a file that is not text."""
        self.file, self.path = DataFile(source, path), path
        with self.file.open() as stream:
            head = stream.read(4096)
        for beginning, kind in BINARY.items():
            if head.startswith(beginning):
                raise ConfigurationError(f"{path} is {kind}")
        is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if b"\0" in head and not is_utf16:
            raise ConfigurationError(f"{path} has null characters: save it as UTF-8")
        self.encoding = "utf-16" if is_utf16 else "utf-8-sig"
        self.head = head.decode(self.encoding, "ignore")

    def read_lines(self) -> Iterator[str]:
        """Yield the lines with their ends.

        Raises ConfigurationError for bytes that are wrong in the file's encoding, or a line of `CELL_CHARACTERS`.
        """
        with self._open() as text:
            for number, line in enumerate(iter(partial(text.readline, CELL_CHARACTERS), ""), 1):
                if len(line) == CELL_CHARACTERS:
                    raise ConfigurationError(
                        f"line {number} of {self.path} has {CELL_CHARACTERS:,} characters or more: break it into "
                        "shorter lines"
                    )
                yield line

    def read(self) -> str:
        """Return the text. Raises ConfigurationError for a wrong encoding."""
        with self._open() as text:
            return text.read()

    @contextmanager
    def _open(self) -> Iterator[io.TextIOWrapper]:
        try:
            with self.file.open() as stream, io.TextIOWrapper(stream, self.encoding, newline="") as text:
                yield text
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{self.path} is not {self.encoding.removesuffix('-sig').upper()} ({error.reason}): "
                f"{error.object[max(0, error.start - 20) : error.start + 20]!r}. Save it as UTF-8"
            ) from None


class Table(Protocol):
    """The rows of a file, as dicts by column name, with a length."""

    names: list[str]
    types: dict[str, ColumnType]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class JsonValues:
    """A file of JSON lines, or with the suffix .json of one array. A line that is not blank, or an item, is a value.

    The items of an array are kept in memory.
    """

    def __init__(
        self,
        source: Path,
        path: PathOrLocation,
        check: Callable[[Any, int, str], None],
        *,
        takes_any_value: bool = False,
    ) -> None:
        """Check the whole file. Messages name it `path`.

        `check` gets each value, its number, counted from 1, and its place for messages. Raises OSError. Raises
        ConfigurationError for a value that is not JSON. Unless `takes_any_value`, also raises it for a value that is no
        object.
        """
        self._file, self._path, self._takes_any_value = TextFile(source, path), path, takes_any_value
        self._most = self._file.file.most
        self._items = self._read_array() if split_suffix(path)[0] == ".json" else None
        self._count = 0
        for value, where in self._read_values():
            if not (takes_any_value or isinstance(value, dict)):
                kind = add_article(type(value).__name__)
                advice = ". If the file is one array, call it NAME.json" if isinstance(value, list) else ""
                raise ConfigurationError(f"{where} is {kind}, and must be an object of variables{advice}")
            self._count += 1
            check(value, self._count, where)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (value for value, _ in self._read_values())

    def _read_array(self) -> list[Any] | None:
        """Return the items of a file that is one array, or None for JSON lines, which may be arrays too."""
        if not self._file.head.lstrip().startswith("["):
            return None
        try:
            return self._decode(self._file.read(), str(self._path))
        except ValueError as error:
            if str(error).startswith("Extra data") and self._takes_any_value:
                return None
            raise ConfigurationError(f"{self._path} is not JSON: {error}") from None

    def _read_values(self) -> Iterator[tuple[Any, str]]:
        """Yield each value with its place in the file, for messages. Raises ConfigurationError."""
        if self._items is not None:
            yield from ((value, f"item {number} of {self._path}") for number, value in enumerate(self._items, 1))
            return
        for number, line in enumerate(self._file.read_lines(), 1):
            if line.strip():
                where = f"line {number} of {self._path}"
                try:
                    yield self._decode(line, where), where
                except ValueError as error:
                    advice = ". If the file is one array, call it NAME.json" if line.startswith("[") else ""
                    raise ConfigurationError(f"{where} is not JSON: {error}{advice}") from None

    def _decode(self, text: str, where: str) -> Any:
        """Return the value of a text. Raises ValueError, and ConfigurationError if it would fill the memory."""
        # Lists and objects of compressed JSON take much more memory than the file.
        size = max(len(text), LIST_BYTES * (text.count("[") + text.count("{")))
        if self._most is not None and size > self._most:
            raise describe_expansion(self._path, size)
        try:
            return JSON.decode(text)
        except RecursionError:
            raise ConfigurationError(f"{where} is nested too deeply: flatten it") from None


class CsvTable:
    """A file of CSV. Only one row at a time is in memory.

    A column has its type from `types`, otherwise `default`, otherwise the first type that fits all of its cells.
    """

    def __init__(
        self,
        source: Path,
        path: PathOrLocation,
        types: dict[str, ColumnType],
        default: ColumnType | None = None,
    ) -> None:
        """Check the whole file. Messages name it `path`.

        Raises OSError. Raises ConfigurationError, with the line, for wrong CSV or a cell without its column's type.
        """
        csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS))
        self._file, self._path, self._skips_blanks = TextFile(source, path), path, False
        header: list[str] = next(self._read_rows(), (1, []))[1]
        self._skips_blanks = any(name.startswith(" ") for name in header)  # The header is like "x, y".
        self.names = [name.strip() for name in header]
        self._check_header()
        self.types: dict[str, ColumnType] = {
            name: kind for name in self.names if (kind := types.get(name) or default) is not None
        }
        fitting: dict[str, list[ColumnType]] = {}
        all_kinds = list(READERS)
        self._count = 0
        for line, row in self._read_data():
            self._count += 1
            for name, cell in zip(self.names, row, strict=True):
                if name in self.types:
                    self._check_cell(name, cell, line)
                elif (kinds := fitting.get(name, all_kinds)) and (text := cell.strip()):  # Empty cells fit all types.
                    fitting[name] = list_fitting_types(text, kinds)
        self.types |= {name: kinds[0] if kinds else "str" for name, kinds in fitting.items()}

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
            raise ConfigurationError(
                f"line {reader.line_num} of the input file {self._path} is not CSV: {error}"
            ) from None

    def _check_header(self) -> None:
        for name in self.names:
            if self.names.count(name) > 1 and name:
                raise ConfigurationError(f"the header of {self._path} has {name!r} twice: rename one of the columns")
        mark = next((mark for mark in OTHER_DELIMITERS if mark in "".join(self.names)), None)
        if len(self.names) != 1 or mark is None:
            return
        raise ConfigurationError(
            f"{self._path} has {OTHER_DELIMITERS[mark]} between its cells: save it with commas, and with points in "
            "numbers"
        )

    def _check_cell(self, name: str, cell: str, line: int) -> None:
        try:
            read_cell(self.types[name], cell)
        except ValueError as error:
            reason = f"{cell[:100]!r} is no {self.types[name]}, which that column is read as. Correct it"
            if isinstance(error, RepeatedKeyError):
                reason = str(error)
            raise ConfigurationError(
                f"line {line} of {self._path}, column {name!r}: {reason}, or read the column as another type "
                f"(--types {name}=str)"
            ) from None
