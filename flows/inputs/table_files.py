"""Tables of inputs: CSV and Parquet files, which are read row by row, as often as needed."""

import csv
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from .cells import ColumnGuess, ColumnType, read_cell
from .text_files import FileCopy, Report, TextFile

BATCH_ROWS = 2000  # So many rows of Parquet are in memory at one time.
CELL_CHARACTERS = 64 * 1024 * 1024  # Data may be long, but a quote that nothing closes must not read the whole file.
WITH_POINT = "c.replace(',', '.') if re.fullmatch('[-+]?[0-9]*,[0-9]+([eE][-+]?[0-9]+)?', c.strip()) else c"
OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class Table(Protocol):
    """Rows of a file, each a dict by the columns' names, and how many there are."""

    names: list[str]
    types: dict[str, ColumnType]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class CsvTable:
    """A file of CSV, of which one row at a time is in memory.

    A column has its type of `types`, else `default`, else the type that all of its cells have.
    """

    def __init__(
        self,
        source: Path,
        path: PathOrLocation,
        types: dict[str, ColumnType],
        default: ColumnType | None = None,
        report: Report | None = None,
    ) -> None:
        """Check the whole file; messages call it `path`.

        Raises ConfigurationError, with the line, for what is no CSV or not of its column's type, and OSError.
        """
        csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS))
        self._file, self._path, self._skips_blanks = TextFile(source, path), path, False
        header: list[str] = next(self._read_rows(), (1, []))[1]
        self._skips_blanks = any(name.startswith(" ") for name in header)  # as in "x, y"
        self.names = [name.strip() for name in header]
        self._check_header()
        self.types: dict[str, ColumnType] = {}
        guesses: dict[str, ColumnGuess] = {}
        for name in self.names:
            if (kind := types.get(name) or default) is None:
                guesses[name] = ColumnGuess()
            else:
                self.types[name] = kind
        self._count = 0
        for line, row in self._read_data(report):
            self._count += 1
            for name, cell in zip(self.names, row, strict=True):
                if name in guesses:
                    guesses[name].add(cell)
                else:
                    self._check_cell(name, cell, line)
        self.types |= {name: kind for name, guess in guesses.items() if (kind := guess.get_type()) is not None}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, row in self._read_data():
            yield {name: read_cell(self.types.get(name), cell) for name, cell in zip(self.names, row, strict=True)}

    def _read_data(self, report: Report | None = None) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows below the header, each with the number of its last line.

        Rows of several cells that are all empty, as spreadsheets write them below a table, are left out at the end.
        """
        rows = self._read_rows(report)
        next(rows, None)
        empty: list[tuple[int, list[str]]] = []
        for line, row in rows:
            if len(row) != len(self.names):
                raise ConfigurationError(
                    f"line {line} of {self._path} has not as many cells as the header: {len(row)}, and there "
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
                f"line {reader.line_num} of the input file {self._path} is no CSV that can be read: {error}"
            ) from None

    def _check_header(self) -> None:
        for name in self.names:
            if self.names.count(name) > 1 and name:
                raise ConfigurationError(f"the header of {self._path} has {name!r} twice: rename one of the columns")
        if self.names and self.names[0].lower().startswith("sep="):
            raise ConfigurationError(f"line 1 of {self._path}, {self.names[0]}, is for Excel alone: delete it")
        mark = next((mark for mark in OTHER_DELIMITERS if mark in "".join(self.names)), None)
        if len(self.names) != 1 or mark is None:
            return
        rows = f"csv.reader(open(sys.argv[1], encoding='{self._file.encoding}', newline=''), delimiter={mark!r})"
        points = ""
        if mark == ";":  # Where cells have semicolons between them, numbers often have commas.
            rows = f"([{WITH_POINT} for c in r] for r in {rows})"
            points = ", with 0,5 as 0.5"
        program = f"import csv, re, sys; csv.writer(sys.stdout).writerows({rows})"
        path = Path(str(self._path))
        files = f"{shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.commas.csv')))}"
        raise ConfigurationError(
            f"{path} has {OTHER_DELIMITERS[mark]} between its cells, and CSV has commas, and points in numbers. "
            f'Convert it{points}: python3 -c "{program}" {files}'
        )

    def _check_cell(self, name: str, cell: str, line: int) -> None:
        try:
            read_cell(self.types[name], cell)
        except ValueError:
            raise ConfigurationError(
                f"line {line} of {self._path}, column {name!r}: {cell[:100]!r} is no {self.types[name]}, which that "
                f"column is read as. Correct it, or read the column as another type (--types {name}=str)"
            ) from None


class ParquetTable:
    """A file of Parquet, with the types that it names. Dates and times become text in ISO 8601."""

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Check the columns; messages call the file `path`.

        Raises ConfigurationError for a column that is no JSON, and where pyarrow is missing, and OSError.
        """
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise ConfigurationError(
                f"{path} is Parquet, which pyarrow reads, and that is not installed: pip install 'rlm-batch[parquet]', "
                "or convert the file to CSV"
            ) from None
        self._copy, self._path, self._arrow, self._parquet = FileCopy(source), path, arrow, parquet
        self.types: dict[str, ColumnType] = {}
        try:
            with parquet.ParquetFile(self._copy.open()) as opened:
                self.names: list[str] = opened.schema_arrow.names
                self._count: int = opened.metadata.num_rows
                for field in opened.schema_arrow:
                    if self.names.count(field.name) > 1:
                        raise ConfigurationError(f"the columns of {path} have {field.name!r} twice: rename one of them")
                    _check_arrow_type(arrow.types, field.type, field.name, path)
            for _ in self:  # pages of data may be damaged
                pass
        except arrow.ArrowException as error:
            raise ConfigurationError(f"the input file {path} is no Parquet that can be read: {error}") from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._parquet.ParquetFile(self._copy.open()) as opened:
            for batch in opened.iter_batches(batch_size=BATCH_ROWS):
                columns = [_convert_times(self._arrow.types, column) for column in batch.columns]
                for row in zip(*columns, strict=True):
                    yield dict(zip(self.names, row, strict=True))


def _check_arrow_type(types: Any, kind: Any, name: str, path: PathOrLocation, *, is_nested: bool = False) -> None:
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        _check_arrow_type(types, kind.value_type, name, path, is_nested=True)
        return
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            _check_arrow_type(types, kind.field(number).type, name, path, is_nested=True)
        return
    is_number = types.is_integer(kind) or (types.is_floating(kind) and not types.is_float16(kind))
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_time = (types.is_date(kind) or types.is_timestamp(kind)) and not is_nested
    if not (is_number or is_text or is_time or types.is_boolean(kind) or types.is_null(kind)):
        raise ConfigurationError(
            f"column {name!r} of {path} is {kind}, and variables are JSON: cast it to a number or text, or leave it out"
        )


def _convert_times(types: Any, column: Any) -> list[Any]:
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_date(column.type) or types.is_timestamp(column.type):
        return [value and value.replace(" ", "T", 1) for value in column.cast("string").to_pylist()]
    return column.to_pylist()
