"""A chunked job's chunks: pairs of an id and its data, in memory or read from a file as they are asked for."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, ClassVar, Protocol

from ...sandbox.errors import ConfigurationError
from .cells import ColumnType
from .readers import InputFile, ItemFile, RuleOfTypes, TypesOfColumns, get_column_types, open_or_take
from .text_files import Report

Chunk = tuple[str, Any]


class ChunkSource(Iterable[Chunk], Sized, Protocol):
    """Chunk ids with their data, in an order, and how many there are."""


class _ChunkFile(InputFile):
    """The chunks of a file whose lines have an id and data."""

    default_types: ClassVar[dict[str, ColumnType]] = {"id": "str"}

    def __init__(self, path: str, types: TypesOfColumns = None, report: Report | None = None) -> None:
        super().__init__(path, types, report)
        ids: set[str] = set()
        for number, (chunk_id, _) in enumerate(self, 1):
            if chunk_id in ids:
                raise ConfigurationError(
                    f"chunk {number} of {self.path} has the id {chunk_id!r}, which an earlier one has too"
                )
            ids.add(chunk_id)

    def __iter__(self) -> Iterator[Chunk]:
        return ((normalize_chunk_id(line["id"]), line["data"]) for line in super().__iter__())

    def check(self, value: dict[str, Any], number: int) -> None:
        self.check_columns(value, f"line {number} of {self.path}")

    def check_columns(self, names: Iterable[str], where: str) -> None:
        if set(names) != {"id", "data"}:
            raise ConfigurationError(f"{where} has {', '.join(map(str, names)) or 'nothing'}: a chunk has id and data")


class _SlicedChunks:
    """Data in lists of so many items, numbered from 0; of a file only one list at a time is in memory."""

    def __init__(self, items: list[Any] | ItemFile, size: int) -> None:
        self._items, self._size = items, size

    @property
    def column_types(self) -> RuleOfTypes:
        """The rule by which the cells of its file were read."""
        return get_column_types(self._items)

    def __len__(self) -> int:
        return (len(self._items) + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Chunk]:
        rest = iter(self._items)
        slices = iter(lambda: list(itertools.islice(rest, self._size)), [])  # until one is empty
        return ((str(number), items) for number, items in enumerate(slices))


def build_chunks(
    chunks: dict[str, Any] | str | None,
    data: list[Any] | str | None,
    chunk_size: int | None,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> ChunkSource:
    """The chunks that these parameters stand for. Raises ConfigurationError."""
    if (chunks is None) == (data is None):
        raise ConfigurationError("pass chunks (data by id), or data with chunk_size: one of the two")
    if data is None and chunk_size is not None:
        raise ConfigurationError("chunk_size goes with data: the chunks are given as they are")
    if data is not None and chunk_size is None:
        raise ConfigurationError("chunk_size is missing: say how many items of the data make a chunk")
    if chunks is not None:
        by_id = open_or_take(_ChunkFile, chunks, types, report)
        source: ChunkSource = by_id if isinstance(by_id, _ChunkFile) else normalize_chunk_ids(by_id).items()
    else:
        assert data is not None
        assert chunk_size is not None
        source = _SlicedChunks(open_or_take(ItemFile, data, types, report), chunk_size)
    if not len(source):
        raise ConfigurationError("there are no chunks: the data is empty")
    return source


def normalize_chunk_ids(chunks: dict[Any, Any]) -> dict[str, Any]:
    """The chunks with ids that are text, as JSON has them. Raises ConfigurationError where two become one."""
    normalized = {normalize_chunk_id(name): value for name, value in chunks.items()}
    if len(normalized) < len(chunks):
        raise ConfigurationError("two chunks have the same id once ids are text, such as 1 and '1': rename one")
    return normalized


def normalize_chunk_id(value: Any) -> str:
    """An id as text. Raises ConfigurationError for what is neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigurationError(f"{value!r} is no chunk id: ids are text or whole numbers")
    return str(value)
