"""Files of inputs in Parquet, and folders of such files, plain or partitioned as by Hive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.requests.data_frames import check_column_names, list_arrow_rows
from .cells import WHOLE, WHOLE_DIGITS
from .file_patterns import match_files, open_file
from .tables import DataFile, check_expansion

NULL = "__HIVE_DEFAULT_PARTITION__"  # a missing value in the name of a directory
VALUE_BYTES = 8  # bytes of a reference to a value in a list
BATCH_ROWS = 100  # rows in memory at a time; a file has a repeated text once, and memory has it for each row


def import_pyarrow(purpose: str) -> Any:
    """Return the module pyarrow, with its reader and writer. Raises ConfigurationError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            f"{purpose} needs pyarrow, which is not installed: pip install 'rlm-batch[parquet]'"
        ) from None
    return pyarrow


class ParquetTable:
    """The rows of a Parquet file, or of all Parquet files below a folder in the order of their paths.

    Files whose names start with a dot or an underscore are skipped, such as _metadata. A directory named `year=2026`
    adds the column `year`. A column that a file lacks is null in its rows.
    """

    def __init__(self, path: PathOrLocation) -> None:
        """Check the columns and read all data once.

        Raises OSError. Raises ConfigurationError if JSON cannot hold a column, columns differ in type, data is damaged,
        a link leads out of the folder, or pyarrow is missing.
        """
        self._arrow = import_pyarrow(f"reading {path}")
        self._path = path
        self._files: Sequence[Callable[[], AbstractContextManager[BinaryIO]]]
        if isinstance(path, Path) and path.is_dir():
            files = _list_files(path)
            self._files = [partial(open_file, file) for file in files.values()]
            self._partitions = _read_partitions(list(files))
        else:
            self._files, self._partitions = [DataFile(path).open], [{}]
        self._count = 0
        try:
            empty = [table.slice(0, 0) for table in self._read_tables(is_empty=True)]
            self._empty = self._arrow.concat_tables(empty, promote_options="permissive")
            self.names: list[str] = self._empty.schema.names
            check_column_names(self.names, path)
            for _ in self:  # Read everything, because pages of data may be damaged.
                self._count += 1
        except self._arrow.ArrowException as error:
            raise ConfigurationError(
                f"{path} is not valid Parquet, or its files do not fit together: {error}"
            ) from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for table in self._read_tables():
            whole = self._arrow.concat_tables([self._empty, table], promote_options="permissive")
            yield from list_arrow_rows(whole, self._path)

    def _read_tables(self, *, is_empty: bool = False) -> Iterator[Any]:
        """Yield the files' rows in small tables. Names of directories, such as `year=2026`, become columns.

        With `is_empty`, yield one table without rows for each file.
        """
        for open_one, partition in zip(self._files, self._partitions, strict=True):
            with open_one() as stream, self._arrow.parquet.ParquetFile(stream) as file:
                check_expansion(self._path, _compute_unpacked_size(file.metadata), stream.seek(0, 2))
                for table in [file.schema_arrow.empty_table()] if is_empty else self._read_batches(file):
                    for name, value in partition.items():
                        column = self._arrow.array([value] * table.num_rows, self._arrow.array([value]).type)
                        table = table.append_column(name, column)
                    yield table.replace_schema_metadata()

    def _read_batches(self, file: Any) -> Iterator[Any]:
        for batch in file.iter_batches(BATCH_ROWS):
            yield self._arrow.Table.from_batches([batch])


def _compute_unpacked_size(metadata: Any) -> int:
    """Return the bytes of a file's values in memory. The file may have many equal values in one byte."""
    size = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(metadata.num_columns):
            column = group.column(column_number)
            size += max(column.total_uncompressed_size, VALUE_BYTES * column.num_values)
    return size


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the Parquet files below a folder, by their names below it. Raises ConfigurationError."""
    matched, left_out = match_files(folder, "**/*.parquet")
    if left_out:
        raise ConfigurationError(f"{folder / left_out[0]} is a link that leads out of {folder}: copy it (cp -rL)")
    files: dict[str, Path] = {}
    for name, file in matched.items():
        is_metadata = any(part.startswith("_") for part in name.split("/"))
        if not is_metadata:
            files[name] = file
    if not files:
        raise ConfigurationError(
            f"{folder} is a folder without Parquet files: name a file, or '{folder}/*' for an execution per file"
        )
    return files


def _read_partitions(names: list[str]) -> list[dict[str, Any]]:
    """Return the columns in the names of each file's directories, as in `year=2024/part.parquet`.

    The texts of a column become integers if all of them are whole numbers.
    """
    partitions: list[dict[str, Any]] = []
    for name in names:
        pairs = [part.split("=", 1) for part in PurePosixPath(name).parts[:-1] if "=" in part]
        partitions.append({unquote(column): None if text == NULL else unquote(text) for column, text in pairs})
    for column in {column for partition in partitions for column in partition}:
        with_text = [partition for partition in partitions if partition.get(column) is not None]
        if all(
            WHOLE.fullmatch(partition[column]) and len(partition[column]) <= WHOLE_DIGITS for partition in with_text
        ):
            for partition in with_text:
                partition[column] = int(partition[column])
    return partitions
