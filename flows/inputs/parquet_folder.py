"""Folders of Parquet files, plain or partitioned as by Hive, as one file."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote

from ...blocks.host_files.source_tree import open_source
from ...sandbox.errors import ConfigurationError
from .cells import WHOLE, WHOLE_DIGITS
from .file_patterns import match_files
from .tables import import_pyarrow, read_batches

NULL = "__HIVE_DEFAULT_PARTITION__"  # a missing value in the name of a directory


@contextmanager
def merge_parquet_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary Parquet file with the rows of all Parquet files below a folder, in the order of their paths.

    Names that start with a dot or an underscore are no data, such as _metadata.
    A directory named `year=2026` adds the column `year`. A column that a file lacks is null in its rows.

    Raises:
        ConfigurationError: There is no such file, a file is damaged or not allowed, their columns differ in type, or
            pyarrow is missing.
        OSError: A file cannot be read.
    """
    arrow, parquet = import_pyarrow(folder)
    matched, left_out = match_files(folder, "**/*.parquet")
    if left_out:
        raise ConfigurationError(
            f"{folder / left_out[0]} is a link that leads out of {folder}: name another folder, or a copy without "
            "links (cp -rL)"
        )
    names = [name for name in matched if not any(part.startswith("_") for part in PurePosixPath(name).parts)]
    files = [matched[name] for name in names]
    if not files:
        raise ConfigurationError(
            f"{folder} is a folder without Parquet files: name a file, or '{folder}/*' for an execution per file"
        )
    partitions = _read_partitions(names)
    try:
        schemas: list[Any] = []
        for path, partition in zip(files, partitions, strict=True):
            with _open_file(path) as file:
                schema = parquet.ParquetFile(file).schema_arrow.remove_metadata()
            for name, value in partition.items():
                if name in schema.names:
                    raise ConfigurationError(f"{path} has the column {name}, which its directory names too: drop it")
                schema = schema.append(arrow.field(name, arrow.array([value]).type))
            schemas.append(schema)
        try:
            merged_schema = arrow.unify_schemas(schemas, promote_options="permissive")
        except arrow.ArrowException as error:
            raise ConfigurationError(
                f"the Parquet files in {folder} have columns of different types: {error}. Convert them to one type"
            ) from None
        with tempfile.NamedTemporaryFile(prefix="rlm-batch-parquet-") as merged:
            with parquet.ParquetWriter(merged, merged_schema) as writer:
                for path, partition in zip(files, partitions, strict=True):
                    with _open_file(path) as file:
                        for batch in read_batches(parquet, file, path):
                            writer.write_batch(_complete_batch(arrow, batch, partition, merged_schema))
            merged.flush()
            yield Path(merged.name)
    except arrow.ArrowException as error:
        raise ConfigurationError(f"a Parquet file in {folder} is not valid: {error}") from None


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


def _complete_batch(arrow: Any, batch: Any, partition: dict[str, Any], schema: Any) -> Any:
    columns: list[Any] = []
    for field in schema:
        if field.name in batch.schema.names:
            try:
                columns.append(batch.column(field.name).cast(field.type))
            except arrow.ArrowException as error:
                raise ConfigurationError(
                    f"column {field.name!r} has several types in the Parquet files, and not every value fits "
                    f"{field.type}: {error}. Convert it to one type"
                ) from None
        else:
            columns.append(arrow.array([partition.get(field.name)] * batch.num_rows, field.type))
    return arrow.record_batch(columns, schema=schema)


@contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    with open_source(path) as fd, open(fd, "rb", closefd=False) as file:
        yield file
