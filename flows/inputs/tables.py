"""Files of inputs: CSV, JSON and Parquet, each copied and checked once, then read as often as needed."""

import codecs
import csv
import gzip
import io
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.requests.json_text import JSON, RepeatedKeyError
from ...sandbox.wire.names import add_article
from .cells import READERS, ColumnType, list_fitting_types, read_cell
from .data_frames import check_column_names, list_arrow_rows

Report = Callable[[str], None]  # takes a line for a person

LARGE_BYTES = 4 * 1024 * 1024  # Reading a larger file is reported.
REPORT_SECONDS = 2.0  # seconds between two reports
WATCHED_LINES = 1000  # lines between two looks at the clock

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
BLANK = re.compile(r"[ \t\n\r]*")  # JSON's blank characters

BATCH_ROWS = 2000  # rows of Parquet in memory at a time
ITEM_BYTES = 8  # bytes of a number in a list
LIST_BYTES = 64  # bytes of memory of an empty list or object, so that a plain file is never over its ratio
BATCH_BYTES = 64 * 1024 * 1024  # bytes of text of these rows
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


class FileCopy:
    """A copy of a file in an unnamed temporary file, which can be read several times at once.

    A run therefore reads the data that was checked, even if the file changes later or is a pipe. The copy of a
    compressed file is unpacked.
    """

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Copy the source. Messages name it `path`, whose suffix tells the compression.

        Raises OSError if it cannot be read, and ConfigurationError if the disk is full or the data is damaged.
        """
        with open(source, "rb") as stream, _open_packed(stream, path) as unpacked:
            try:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # Garbage collection closes it.
                self.most = max(UNPACKED_BYTES, UNPACKED_RATIO * os.fstat(stream.fileno()).st_size)
                while piece := unpacked.read(PIECE_BYTES):
                    self._file.write(piece)
                    if unpacked is not stream and self._file.tell() > self.most:
                        raise describe_expansion(path, self._file.tell())
                self._file.flush()
            except OSError as error:
                if isinstance(error, gzip.BadGzipFile):
                    raise _describe_damage(path, error) from None
                raise ConfigurationError(
                    f"{source} cannot be copied to a temporary file in {tempfile.gettempdir()}: {error.strerror}. Free "
                    "some space, or name another directory with the environment variable TMPDIR"
                ) from None
            except Exception as error:
                if isinstance(error, (EOFError, zlib.error)) or type(error).__name__ == "ZstdError":
                    raise _describe_damage(path, error) from None
                raise
        self.size = self._file.tell()

    def open(self) -> BinaryIO:
        """Open the copy, at its beginning."""
        return io.BufferedReader(_PositionedReader(self._file.fileno(), self.size))  # type: ignore[return-value]


def _open_packed(stream: BinaryIO, path: PathOrLocation) -> BinaryIO:
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


def _describe_damage(path: PathOrLocation, error: Exception) -> ConfigurationError:
    suffix = split_suffix(path)[1]
    return ConfigurationError(f"{path} is damaged, or not compressed as {suffix} says: {error}")


class _PositionedReader(io.RawIOBase):
    """A reader with its own position in a file that several readers share."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size, self._position = fd, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class TextFile:
    """A copy of a text file in UTF-8, or in UTF-16 with a byte order mark. Messages name the file `path`."""

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Copy the file and find its encoding. Raises OSError, and ConfigurationError for a file that is not text."""
        self.copy, self.path = FileCopy(source, path), path
        with self.copy.open() as stream:
            head = stream.read(4096)
        is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        self.encoding = "utf-16" if is_utf16 else "utf-8-sig"
        for beginning, kind in BINARY.items():
            if head.startswith(beginning):
                raise ConfigurationError(f"{path} is {kind}")
        if head[1:4:2] == b"\0\0" or head[:4:2] == b"\0\0":
            raise ConfigurationError(f"{path} has null characters, like UTF-16 without its mark: save it as UTF-8")
        if b"\0" in head and not is_utf16:
            raise ConfigurationError(f"{path} has null characters: remove them")

    def read_lines(self, report: Report | None = None, most: int = CELL_CHARACTERS) -> Iterator[str]:
        """Yield the lines with their ends, and report how far a large file has been read.

        Raises ConfigurationError, with the line, for bytes that are wrong in the file's encoding, or a line of at least
        `most` characters; -1 for no limit.
        """
        if report is not None and self.copy.size >= LARGE_BYTES:
            report(f"reading {self.path}, {self.copy.size / 1e6:.0f} MB")
        reported_at = time.monotonic()
        with self.copy.open() as stream, io.TextIOWrapper(stream, self.encoding, newline="") as text:
            try:
                for number, line in enumerate(iter(partial(text.readline, most), ""), 1):
                    if len(line) == most:
                        raise ConfigurationError(
                            f"line {number} of {self.path} has {most:,} characters or more: break it into shorter lines"
                        )
                    yield line
                    if number % WATCHED_LINES == 0 and time.monotonic() >= reported_at + REPORT_SECONDS and report:
                        reported_at = time.monotonic()
                        report(f"reading {self.path}: {100 * stream.tell() // self.copy.size}%")
            except UnicodeDecodeError as error:
                raise self._describe_encoding(error) from None

    def read(self) -> str:
        """Return the whole text. Raises as `read_lines` does."""
        return "".join(self.read_lines())

    def _describe_encoding(self, error: UnicodeDecodeError) -> ConfigurationError:
        if self.encoding == "utf-16":
            return ConfigurationError(f"{self.path} is not UTF-16, although its first bytes say so: {error.reason}")
        where, shown = str(self.path), ""
        with self.copy.open() as stream:
            for number, line in enumerate(stream, 1):
                if line.decode("utf-8", "replace").encode() != line:
                    where = f"line {number} of {self.path}"
                    shown = escape_text(line[:40].decode("utf-8", "replace").strip())
                    break
        return ConfigurationError(
            f"{where} is not UTF-8 ({error.reason}): {shown!r}. Save it as UTF-8, or convert it, as with "
            "iconv -f windows-1252 -t utf-8"
        )


class Table(Protocol):
    """The rows of a file, as dicts by column name, with a length."""

    names: list[str]
    types: dict[str, ColumnType]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class JsonValues:
    """A file of JSON lines, or with the suffix .json of one array. A line that is not blank, or an item, is a value."""

    def __init__(
        self,
        source: Path,
        path: PathOrLocation,
        check: Callable[[Any, int, str], None],
        report: Report | None = None,
        *,
        takes_any_value: bool = False,
    ) -> None:
        """Check the whole file. Messages name it `path`.

        `check` gets each value, its number, counted from 1, and its place for messages. Raises OSError. Raises
        ConfigurationError for a value that is not JSON. Unless `takes_any_value`, also raises it for a value that is no
        object.
        """
        self._file, self._path, self._takes_any_value = TextFile(source, path), path, takes_any_value
        is_json = split_suffix(path)[0] == ".json"
        self._read_lines = partial(self._file.read_lines, most=-1 if is_json else CELL_CHARACTERS)
        self._is_array = is_json and self._find_array()
        self._count = 0
        for value, where in self._read_values(report):
            self._count += 1
            check(value, self._count, where)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (value for value, _ in self._read_values())

    def _find_array(self) -> bool:
        """Return whether the file is one array, and not lines that are arrays."""
        line = next((line for line in self._read_lines() if line.strip()), "")
        if not line.lstrip().startswith("["):
            return False
        if not self._takes_any_value:
            return True
        try:  # A line that is a whole array may be followed by others.
            JSON.decode(line)
        except (ValueError, RecursionError):
            return True
        return sum(bool(line.strip()) for line in self._read_lines()) == 1

    def _read_values(self, report: Report | None = None) -> Iterator[tuple[Any, str]]:
        """Yield each value with its place in the file, for messages. Raises ConfigurationError."""
        if self._is_array:
            yield from self._read_items(report)
            return
        for number, line in enumerate(self._read_lines(report), 1):
            if line.strip():
                where = f"line {number} of {self._path}"
                self._check_size(line)
                try:
                    value = JSON.decode(line)
                except (ValueError, RecursionError) as error:
                    raise self._describe_problem(where, error, line) from None
                yield self._check_kind(value, where, line), where

    def _read_items(self, report: Report | None) -> Iterator[tuple[Any, str]]:
        """Yield the items of an array. Only its text is in memory as a whole."""
        text = "".join(self._read_lines(report))
        self._check_size(text)
        at = _skip_blank(text, text.index("[") + 1)
        line, counted, mark = 1, 0, text[at : at + 1]
        while mark != "]":
            line, counted = line + text.count("\n", counted, at), at
            where = f"line {line} of {self._path}"
            try:
                value, end = JSON.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise self._describe_problem(where, error) from None
            yield self._check_kind(value, where), where
            end = _skip_blank(text, end)
            mark = text[end : end + 1]
            at = _skip_blank(text, end + 1)
            if mark not in (",", "]") or (mark == "]" and at < len(text)):
                line += text.count("\n", counted, end)
                raise ConfigurationError(
                    f"line {line} of {self._path} is not JSON: after an item of an array comes a comma or the end"
                )

    def _check_size(self, text: str) -> None:
        """Raise ConfigurationError if the lists and objects of compressed JSON could fill the memory."""
        size = LIST_BYTES * (text.count("[") + text.count("{"))
        if size > self._file.copy.most:
            raise describe_expansion(self._path, size)

    def _check_kind(self, value: Any, where: str, line: str = "") -> Any:
        if not (self._takes_any_value or isinstance(value, dict)):
            kind = type(value).__name__
            raise ConfigurationError(
                f"{where} is {add_article(kind)}, and must be an object of variables{self._advise_array(line)}"
            )
        return value

    def _describe_problem(self, where: str, error: Exception, line: str = "") -> ConfigurationError:
        if isinstance(error, RecursionError):
            return ConfigurationError(f"{where} is nested too deeply: flatten it")
        return ConfigurationError(f"{where} is not JSON: {error}{self._advise_array(line)}")

    def _advise_array(self, line: str) -> str:
        return ". If the file is one array, call it NAME.json" if line.lstrip().startswith("[") else ""


def _skip_blank(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not blank in JSON."""
    match = BLANK.match(text, at)
    assert match is not None
    return match.end()


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
        report: Report | None = None,
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
        for line, row in self._read_data(report):
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

    def _read_data(self, report: Report | None = None) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows below the header, each with the number of its last line.

        Skip rows at the end that have several cells, all empty. Spreadsheets write such rows below a table.
        """
        rows = self._read_rows(report)
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

    def _read_rows(self, report: Report | None = None) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(self._file.read_lines(report), strict=True, skipinitialspace=self._skips_blanks)
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
        if self.names and self.names[0].lower().startswith("sep="):
            raise ConfigurationError(f"line 1 of {self._path}, {self.names[0]}, is only for Excel: delete it")
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
                reason = error.msg
            raise ConfigurationError(
                f"line {line} of {self._path}, column {name!r}: {reason}, or read the column as another type "
                f"(--types {name}=str)"
            ) from None


def import_pyarrow(path: PathOrLocation) -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet. Raises ConfigurationError if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            f"reading {path} needs pyarrow, which is not installed: pip install 'rlm-batch[parquet]', or convert it to "
            "CSV"
        ) from None
    return pyarrow, pyarrow.parquet


class ParquetTable:
    """A file of Parquet, with the types that it names."""

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Check the columns and read all data once. Messages name the file `path`.

        Raises OSError. Raises ConfigurationError if JSON cannot hold a column, data is damaged, or pyarrow is missing.
        """
        arrow, parquet = import_pyarrow(path)
        self._copy, self._path, self._parquet = FileCopy(source, path), path, parquet
        self.types: dict[str, ColumnType] = {}
        try:
            with parquet.ParquetFile(self._copy.open()) as opened:
                self.names: list[str] = opened.schema_arrow.names
                self._count: int = opened.metadata.num_rows
            check_column_names(self.names, path)
            for _ in self:  # Read everything, because pages of data may be damaged.
                pass
        except arrow.ArrowException as error:
            raise ConfigurationError(f"the input file {path} is not valid Parquet: {error}") from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in read_batches(self._parquet, self._copy.open(), self._path):
            yield from list_arrow_rows(batch, self._path)


def read_batches(parquet: Any, stream: BinaryIO, path: PathOrLocation) -> Iterator[Any]:
    """Yield the rows of a file of Parquet in batches that fit into memory. Raises ConfigurationError."""
    size = stream.seek(0, os.SEEK_END)
    with parquet.ParquetFile(stream) as opened:
        groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        leaves = [opened.schema.column(number) for number in range(len(opened.schema))]
        # Lists of one number that repeats take little space in the file.
        items = sum(
            group.column(number).num_values
            for group in groups
            for number, leaf in enumerate(leaves)
            if leaf.max_repetition_level
        )
        unpacked = max(sum(group.total_byte_size for group in groups), ITEM_BYTES * items)
        if unpacked > max(UNPACKED_BYTES, UNPACKED_RATIO * size):
            raise describe_expansion(path, unpacked)
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        for number in range(len(groups)):
            rows = BATCH_ROWS
            if texts:  # A file has a repeated text once, and memory has it for each row.
                with parquet.ParquetFile(stream, read_dictionary=texts) as probe:
                    for first in probe.iter_batches(1, [number], texts):
                        longest = sum(map(_measure_longest_text, first.columns))
                        rows = max(1, min(rows, BATCH_BYTES // max(1, longest)))
                        break
            yield from opened.iter_batches(rows, [number])


def _measure_longest_text(column: Any) -> int:
    """Return the bytes of the longest text of a column, or the size of all texts if it is nested."""
    compute: Any = import_module("pyarrow.compute")
    if not hasattr(column, "dictionary"):
        return column.nbytes
    return compute.max(compute.binary_length(column.dictionary)).as_py() or 0
