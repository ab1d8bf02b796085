"""Text files of inputs: their copies, their encodings, and advice where a file is something else."""

import codecs
import io
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.text_escape import escape_text

Report = Callable[[str], None]  # takes a line for a person

LARGE_BYTES = 4 * 1024 * 1024  # Reading a larger file is reported.
REPORT_SECONDS = 2.0  # from one report to the next
WATCHED_LINES = 1000  # from one look at the clock to the next

SPREADSHEET = (
    "a spreadsheet: save it as CSV UTF-8 there, or with pandas.read_excel(FILE).to_csv('NAME.csv', index=False)"
)
COMPRESSED = "compressed: unpack it with gunzip"
BINARY = {
    b"PK\x03\x04": SPREADSHEET,  # Spreadsheets are ZIP archives.
    b"\xd0\xcf\x11\xe0": SPREADSHEET,  # Excel wrote these until 2007.
    b"\x1f\x8b": COMPRESSED,
    b"PAR1": "Parquet: call it NAME.parquet",
}


class FileCopy:
    """A copy of a file in an unnamed temporary file, which can be read several times at once.

    A run therefore reads what was checked, even if the file has changed since, or was a pipe.
    """

    def __init__(self, source: Path) -> None:
        """Raises OSError where the source cannot be read, and ConfigurationError where the disk is full."""
        with open(source, "rb") as stream:
            try:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # Garbage collection closes it.
                shutil.copyfileobj(stream, self._file)
                self._file.flush()
            except OSError as error:
                raise ConfigurationError(
                    f"{source} cannot be copied to a temporary file in {tempfile.gettempdir()}: {error.strerror}. Free "
                    "some space, or name another directory with the environment variable TMPDIR"
                ) from None
        self.size = self._file.tell()

    def open(self) -> BinaryIO:
        """Open the copy, at its beginning."""
        return io.BufferedReader(_PositionedReader(self._file.fileno(), self.size))  # type: ignore[return-value]


class _PositionedReader(io.RawIOBase):
    """A reader with its own position in a file that others read as well."""

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
    """A copy of a text file in UTF-8, or in UTF-16 with its mark; messages call it `path`."""

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Raises OSError, and ConfigurationError for a file that is no text."""
        self.copy, self.path = FileCopy(source), path
        with self.copy.open() as stream:
            head = stream.read(4096)
        is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        self.encoding = "utf-16" if is_utf16 else "utf-8-sig"
        for beginning, kind in BINARY.items():
            if head.startswith(beginning):
                raise ConfigurationError(f"{path} is {kind}")
        if head[1:4:2] == b"\0\0" or head[:4:2] == b"\0\0":
            encoding = "utf-16le" if head[1] == 0 else "utf-16be"
            raise ConfigurationError(
                f"{path} has null characters, as UTF-16 without its mark has. {self._advise_conversion(encoding)}"
            )
        if b"\0" in head and not is_utf16:
            command = self._spell_command("tr -d '\\000' <")
            raise ConfigurationError(f"{path} has null characters, which text has not. Remove them: {command}")

    def read_lines(self, report: Report | None = None) -> Iterator[str]:
        """Yield the lines with their ends, and report how far a large file has been read.

        Raises ConfigurationError for bytes that are not in the file's encoding, with their line.
        """
        if report is not None and self.copy.size >= LARGE_BYTES:
            report(f"reading {self.path}, {self.copy.size / 1e6:.0f} MB")
        reported_at = time.monotonic()
        with self.copy.open() as stream, io.TextIOWrapper(stream, self.encoding, newline="") as text:
            try:
                for number, line in enumerate(text, 1):
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
            return ConfigurationError(f"{self.path} is no UTF-16, as its first bytes say: {error.reason}")
        where, shown, advice = str(self.path), "", self._advise_conversion("windows-1252")
        with self.copy.open() as stream:
            for number, line in enumerate(stream, 1):
                if line.decode("utf-8", "replace").encode() != line:
                    where = f"line {number} of {self.path}"
                    shown = escape_text(line[:40].decode("utf-8", "replace").strip())
                    break
        return ConfigurationError(f"{where} is not UTF-8 ({error.reason}): {shown!r}. {advice}")

    def _advise_conversion(self, encoding: str) -> str:
        return f"If it is {encoding}, convert it: {self._spell_command(f'iconv -f {encoding} -t utf-8')}"

    def _spell_command(self, program: str) -> str:
        path = Path(str(self.path))
        return f"{program} {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix(f'.utf8{path.suffix}')))}"
