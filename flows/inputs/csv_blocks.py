"""The cells of a CSV file, some ten kilobytes at a time: a list of texts for each column."""

import csv
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text
from .column_types import is_plain

BLOCK_CHARACTERS = 64 * 1024  # what a processor keeps at hand
BLOCK_ROWS = 2000
CELL_CHARACTERS = 64 * 1024 * 1024  # of a cell: data may be long, but a quote left open is not all of a file


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other: the cells of each column, and where the rows are."""

    columns: list[list[str]]
    lines: range | list[int]  # the last line of each row, from 1
    is_plain: bool = False  # it is known that `column_types.is_plain` holds for each cell


class CsvBlocks:
    """An open CSV file: `header` has the columns' names, and iterating over it once gives its blocks.

    Each of its methods raises ConfigurationError for what is no CSV, with the line, and OSError.
    `is_strict` also refuses a quote that stands within a cell, or that nothing closes.
    """

    def __init__(self, file: TextIO, path: PathOrLocation, *, is_strict: bool) -> None:
        """`file` was opened with `open_text`, and messages call it `path`."""
        self._file, self._path, self._is_strict = file, path, is_strict
        csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS))
        self._lines = 0  # that were read
        reader = self._open_reader(iter(file.readline, ""))
        self.header: list[str] = next((row for row, _ in self._read_rows(reader)), [])
        self._lines = reader.line_num
        for name in self.header:
            if self.header.count(name) > 1:
                raise ConfigurationError(f"the header of {path} has {name!r} twice: rename one of the columns")
            self._check_encoding([name], "the header", lambda _: 1)

    def __iter__(self) -> Iterator[Block]:
        rest = ""
        while text := self._file.read(BLOCK_CHARACTERS):
            text = rest + text
            if '"' in text:  # what is quoted may go on in any of the next
                text += "" if text.endswith("\n") else self._file.readline()  # the rest of its last line
                yield from self._read_carefully(itertools.chain(io.StringIO(text, newline=""), self._file))
                return
            end = text.rfind("\n") + 1
            text, rest = text[:end], text[end:]
            if len(rest) > CELL_CHARACTERS:
                raise ConfigurationError(f"line {self._lines + 1} of {self._path} has no end: is it CSV?")
            if text:
                yield from self._split(text)
        if rest:
            yield from self._split(rest + "\n")

    def _split(self, text: str) -> Iterator[Block]:
        """The blocks of whole lines without quotes; one, unless there is something else about them."""
        lines = text.replace("\r\n", "\n") if "\r" in text else text  # the search for two takes 200 times as long
        cells = lines.replace("\n", "\n,").split(",")
        cells.pop()
        width = len(self.header)
        columns = [cells[number::width] for number in range(width)]
        last = "".join(columns[-1]).split("\n") if columns else []
        count = len(last) - 1
        # Each line ends with a row, and none within one, is empty, or ends in some other way.
        is_regular = len(cells) == width * count and lines.count("\n") == count and "\r" not in lines
        if not is_regular or (width == 1 and "" in last[:-1]):
            yield from self._read_carefully(io.StringIO(text, newline=""))
            return
        last.pop()
        columns[-1] = last
        first = self._lines + 1
        self._lines += count
        block = Block(columns, range(first, first + count), is_plain(lines))
        if not text.isascii():
            self._check_block(block)
        yield block

    def _read_carefully(self, lines: Iterator[str] | TextIO) -> Iterator[Block]:
        reader = self._open_reader(lines)
        rows = self._read_rows(reader)
        first = self._lines
        while some := list(itertools.islice(rows, BLOCK_ROWS)):
            columns = [list(cells) for cells in zip(*(row for row, _ in some), strict=True)]
            block = Block(columns, [line for _, line in some])
            self._check_block(block)
            yield block
        self._lines = first + reader.line_num

    def _open_reader(self, lines: Iterator[str] | TextIO) -> "csv._reader":  # type: ignore[reportPrivateUsage]
        return csv.reader(lines, strict=self._is_strict)

    def _read_rows(self, reader: "csv._reader") -> Iterator[tuple[list[str], int]]:  # type: ignore[reportPrivateUsage]
        """Rows that are not empty, with the line of each."""
        first = self._lines
        header: list[str] | None = getattr(self, "header", None)
        try:
            for row in reader:
                if not row:
                    continue
                line = first + reader.line_num
                if header is not None and len(row) != len(header):
                    raise ConfigurationError(
                        f"line {line} of {self._path} has not as many cells as the header: {', '.join(header)}"
                    )
                yield row, line
        except csv.Error as error:
            raise ConfigurationError(
                f"line {first + reader.line_num} of the input file {self._path} is no CSV that can be read: {error}"
            ) from None

    def _check_block(self, block: Block) -> None:
        for name, cells in zip(self.header, block.columns, strict=True):
            self._check_encoding(cells, f"column {name!r}", block.lines.__getitem__)

    def _check_encoding(self, cells: list[str], where: str, find_line: Callable[[int], int]) -> None:
        """Raises ConfigurationError for bytes that are no UTF-8, which were read as halves of surrogates."""
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            for number, cell in enumerate(cells):
                try:
                    cell.encode()
                except UnicodeEncodeError as error:
                    data = cell.encode("utf-8", "surrogateescape")
                    shown = escape_text(data[:40].decode("utf-8", "replace"))
                    raise ConfigurationError(
                        f"line {find_line(number)} of the input file {self._path}, {where}, is not UTF-8: {shown!r} "
                        f"({error.reason}). Convert the file, as with iconv -f latin1 -t utf-8"
                    ) from None


def open_text(file: Path) -> TextIO:
    """A file of CSV, with or without a byte order mark. Raises OSError."""
    return open(str(file), encoding="utf-8-sig", errors="surrogateescape", newline="")
