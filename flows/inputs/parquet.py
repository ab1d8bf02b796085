"""Files of inputs in Parquet, and folders of such files, plain or partitioned as by Hive."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote

from ...blocks.host_files.source_tree import open_source
from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from .cells import WHOLE, WHOLE_DIGITS, ColumnType
from .data_frames import check_column_names, list_arrow_rows
from .file_patterns import match_files
from .tables import UNPACKED_BYTES, UNPACKED_RATIO, DataFile, describe_expansion

NULL = "__HIVE_DEFAULT_PARTITION__"  # a missing value in the name of a directory
VALUE_BYTES = 8  # bytes of a reference to a value in a list
BATCH_ROWS = 100  # rows in memory at a time; a file has a repeated text once, and memory has it for each row


class ParquetTable:
    """A file of Parquet, or all such files below a folder in the order of their paths, with the types that they name.

    Names that start with a dot or an underscore are no data, such as _metadata. A directory named `year=2026` adds the
    column `year`. A column that a file lacks is null in its rows.
    """

    def __init__(self, source: Path, path: PathOrLocation) -> None:
        """Check the columns and read all data once. Messages name the file or folder `path`.

        Raises OSError. Raises ConfigurationError if JSON cannot hold a column, columns differ in type, data is damaged,
        a link leads out of the folder, or pyarrow is missing.
        """
        self._arrow, self._parquet = import_pyarrow(path)
        self._path = path
        self.types: dict[str, ColumnType] = {}
        self._files: dict[str, Callable[[], AbstractContextManager[BinaryIO]]]
        if source.is_dir():
            self._files = {name: partial(_open_below, file) for name, file in _list_files(source).items()}
        else:
            self._files = {str(path): DataFile(source, path).open}
        self._partitions = _read_partitions(list(self._files)) if source.is_dir() else [{}]
        self._count = 0
        try:
            self._schema = self._merge_schemas()
            self.names: list[str] = self._schema.names
            check_column_names(self.names, path)
            for _ in self:  # Read everything, because pages of data may be damaged.
                self._count += 1
        except self._arrow.ArrowException as error:
            raise ConfigurationError(f"{path} is not valid Parquet: {error}") from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for opened, partition in zip(self._open_files(), self._partitions, strict=True):
            for batch in opened.iter_batches(BATCH_ROWS):
                yield from list_arrow_rows(self._complete(batch, partition), self._path)

    def _open_files(self) -> Iterator[Any]:
        """Yield each file, open. Raises ConfigurationError for a small file of much data."""
        for open_file in self._files.values():
            with open_file() as stream, self._parquet.ParquetFile(stream) as opened:
                unpacked, size = _measure_values(opened.metadata), stream.seek(0, 2)
                if unpacked > max(UNPACKED_BYTES, UNPACKED_RATIO * size):
                    raise describe_expansion(self._path, unpacked)
                yield opened

    def _merge_schemas(self) -> Any:
        """Return the columns of all files and of their directories. Raises ConfigurationError."""
        schemas: list[Any] = []
        for opened, partition in zip(self._open_files(), self._partitions, strict=True):
            schema = opened.schema_arrow.remove_metadata()
            for name, value in partition.items():
                if name in schema.names:
                    raise ConfigurationError(
                        f"{self._path} has the column {name}, which a directory names too: drop it"
                    )
                schema = schema.append(self._arrow.field(name, self._arrow.array([value]).type))
            schemas.append(schema)
        if len(schemas) == 1:
            return schemas[0]
        try:
            return self._arrow.unify_schemas(schemas, promote_options="permissive")
        except self._arrow.ArrowException as error:
            raise ConfigurationError(
                f"the Parquet files in {self._path} have columns of different types: {error}. Convert them to one type"
            ) from None

    def _complete(self, batch: Any, partition: dict[str, Any]) -> Any:
        """Return rows of one file with the columns of all files. Raises ConfigurationError."""
        if batch.schema.equals(self._schema):
            return batch
        columns: list[Any] = []
        for field in self._schema:
            if field.name not in batch.schema.names:
                columns.append(self._arrow.array([partition.get(field.name)] * batch.num_rows, field.type))
                continue
            try:
                columns.append(batch.column(field.name).cast(field.type))
            except self._arrow.ArrowException as error:
                raise ConfigurationError(
                    f"column {field.name!r} has several types in the Parquet files, and not every value fits "
                    f"{field.type}: {error}. Convert it to one type"
                ) from None
        return self._arrow.record_batch(columns, schema=self._schema)


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


def _measure_values(metadata: Any) -> int:
    """Return the bytes of a file's values in memory, at least. One byte of a file may stand for many equal values."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = (group.column(number) for group in groups for number in range(metadata.num_columns))
    return sum(max(column.total_uncompressed_size, VALUE_BYTES * column.num_values) for column in columns)


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the Parquet files below a folder, by their names below it. Raises ConfigurationError."""
    matched, left_out = match_files(folder, "**/*.parquet")
    if left_out:
        raise ConfigurationError(
            f"{folder / left_out[0]} is a link that leads out of {folder}: name another folder, or a copy without "
            "links (cp -rL)"
        )
    hidden = [name for name in matched if any(part.startswith("_") for part in PurePosixPath(name).parts)]
    files = {name: file for name, file in matched.items() if name not in hidden}
    if not files:
        raise ConfigurationError(
            f"{folder} is a folder without Parquet files: name a file, or '{folder}/*' for an execution per file"
        )
    return files


def _read_partitions(names: list[str]) -> list[dict[str, Any]]:
    """Return the columns that each file's directories name, with integers where a column of CSV has them."""
    partitions: list[dict[str, Any]] = []
    for name in names:
        pairs = (part.partition("=") for part in PurePosixPath(name).parts[:-1] if "=" in part)
        partitions.append({unquote(key): None if text == NULL else unquote(text) for key, _, text in pairs})
    for key in dict.fromkeys(key for partition in partitions for key in partition):
        having = [partition for partition in partitions if partition.get(key) is not None]
        if all(WHOLE.fullmatch(partition[key]) and len(partition[key]) <= WHOLE_DIGITS for partition in having):
            for partition in having:
                partition[key] = int(partition[key])
    return partitions


@contextmanager
def _open_below(path: Path) -> Iterator[BinaryIO]:
    with open_source(path) as fd, open(fd, "rb", closefd=False) as file:
        yield file
