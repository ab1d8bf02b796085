"""Files of inputs that are tables, CSV and Parquet: parsed once, a block of rows at a time, into a spool of columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from .block_spool import BlockSpool
from .column_types import CellError, ColumnType, convert_to_float, find_column_type, merge_types, read_cells
from .csv_blocks import BLOCK_ROWS, CsvBlocks, open_text
from .reading_progress import OnBytes


class Table:
    """Rows of a file, each a dict by the columns' names, as often as somebody asks for them."""

    def __init__(self, names: list[str], types: dict[str, ColumnType], blocks: BlockSpool, count: int) -> None:
        self.names, self.types, self._blocks, self._count = names, types, blocks, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = self.names
        for columns in self._read_columns(range(len(names))):
            for row in zip(*columns, strict=True):
                yield dict(zip(names, row, strict=True))

    def iter_column(self, name: str) -> Iterator[Any]:
        """The values of one column."""
        number = self.names.index(name)
        for (values,) in self._read_columns([number]):
            yield from values

    def _read_columns(self, numbers: Any) -> Iterator[list[list[Any]]]:
        kinds = [self.types.get(name) for name in self.names]
        for block in self._blocks:
            columns = [block[number] for number in numbers]
            for place, number in enumerate(numbers):
                kind, values = columns[place]
                columns[place] = convert_to_float(values) if kind != kinds[number] == "float" else values
            yield columns


def read_csv(
    file: Path, path: PathOrLocation, types: dict[str, ColumnType], default: ColumnType | None, on_bytes: OnBytes
) -> Table:
    """A file of CSV; messages call it `path`.

    A column has its type of `types`, else `default`, and without one the type that all of its cells have. It is parsed
    once, unless a column of numbers turns out to have text further down: then a second time. Raises
    ConfigurationError, with line and column, and OSError.
    """
    found: dict[str, ColumnType | None] = {}
    while True:
        before = dict(found)
        names, blocks, count, is_text = _parse_csv(file, path, types, default, found, on_bytes)
        if not is_text:
            known: dict[str, ColumnType] = {}
            for name in names:
                if (kind := types.get(name) or default or found.get(name)) is not None:
                    known[name] = kind
            return Table(names, known, blocks, count)
        assert before != found


def _parse_csv(
    file: Path,
    path: PathOrLocation,
    types: dict[str, ColumnType],
    default: ColumnType | None,
    found: dict[str, ColumnType | None],
    on_bytes: OnBytes,
) -> tuple[list[str], BlockSpool, int, bool]:
    """A pass over a file: the names, the blocks, the number of rows, and whether it has to be parsed again.

    `found` are the types that columns have as far as is known; it is kept up to date.
    """
    blocks, count, is_text = BlockSpool(), 0, False
    with open_text(file) as text:
        parsed = CsvBlocks(text, path, is_strict=default != "json")
        for block in parsed:
            columns: list[tuple[ColumnType | None, list[Any]]] = []
            for name, cells in zip(parsed.header, block.columns, strict=True):
                kind = types.get(name) or default
                if kind is not None:
                    try:
                        columns.append((kind, read_cells(cells, kind)))
                    except CellError as error:
                        raise ConfigurationError(
                            f"line {block.lines[error.number]} of {path}, column {name!r}: {error.cell[:100]!r} is no "
                            f"{kind}, which that column is read as. Correct it, or read the column as another type "
                            f"(--types {name}=str)"
                        ) from None
                    continue
                known = found.get(name)
                if known == "str":
                    columns.append(("str", cells))
                    continue
                kind, values = find_column_type(cells, known, are_plain=block.is_plain)
                found[name] = merge_types(known, kind)
                # What is in the spool of such a column already are numbers, or None for words such as NA.
                is_text = is_text or (found[name] == "str" and count > 0)
                columns.append((kind, values))
            count += len(block.lines)
            if not is_text:
                blocks.append(columns)
            on_bytes(text.buffer.tell())
    return parsed.header, blocks, count, is_text


def read_parquet(file: Path, path: PathOrLocation, on_bytes: OnBytes) -> Table:
    """A file of Parquet, whose columns have types of their own.

    Dates and times become text as ISO 8601 has it. Raises ConfigurationError for a column that is no JSON, and where
    pyarrow is missing, and OSError.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigurationError(
            f"{path} is Parquet, which pyarrow reads, and that is not installed: pip install 'rlm-batch[parquet]', or "
            "convert the file to CSV"
        ) from None
    blocks, count = BlockSpool(), 0
    try:
        with parquet.ParquetFile(file) as opened:
            names: list[str] = opened.schema_arrow.names
            for name in names:
                if names.count(name) > 1:
                    raise ConfigurationError(f"the columns of {path} have {name!r} twice: rename one of them")
                _check_arrow_type(arrow.types, opened.schema_arrow.field(name).type, name, path)
            for batch in opened.iter_batches(batch_size=BLOCK_ROWS):
                blocks.append([(None, _convert_times(arrow.types, column)) for column in batch.columns])
                count += batch.num_rows
                on_bytes(file.stat().st_size * count // opened.metadata.num_rows)
    except arrow.ArrowException as error:
        raise ConfigurationError(f"the input file {path} is no Parquet that can be read: {error}") from None
    return Table(names, {}, blocks, count)


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
