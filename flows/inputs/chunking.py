"""A chunked job's parts: pairs of an id and its data, in memory or read from a file as they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

from ...sandbox.errors import ConfigurationError
from .readers import FileInputs, FileRows

Chunk = tuple[str, Any]


class ChunkSource(Iterable[Chunk], Sized, Protocol):
    """Chunk ids with their data, in an order, and how many there are."""


class _MappedChunks:
    """The chunks of a dict."""

    def __init__(self, chunks: dict[str, Any]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.items())


class _FileChunks:
    """The chunks of a file whose lines have an id and data; only one line at a time is in memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        seen: set[str] = set()
        # Read once to see that the ids differ; counting and checking are the same reading.
        self._lines = FileInputs(path, check=lambda line, number: self._checked(line, number, seen))

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Chunk]:
        return ((normalize_chunk_id(line["id"]), line["data"]) for line in self._lines)

    def _checked(self, line: dict[str, Any], number: int, seen: set[str]) -> None:
        if set(line) != {"id", "data"}:
            raise ConfigurationError(
                f"line {number} of {self._path} has {', '.join(map(str, line)) or 'nothing'}: a chunk has id and data"
            )
        name = normalize_chunk_id(line["id"])
        if name in seen:
            raise ConfigurationError(f"line {number} of {self._path} has the id {name!r}, which an earlier one has too")
        seen.add(name)


class _SlicedChunks:
    """Data in lists of so many items, numbered from 0; of a file only one list at a time is in memory."""

    def __init__(self, rows: list[Any] | FileRows, size: int) -> None:
        self._rows, self._size = rows, size

    def __len__(self) -> int:
        return (len(self._rows) + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Chunk]:
        rows = iter(self._rows)
        for number in itertools.count():
            part = list(itertools.islice(rows, self._size))
            if not part:
                return
            yield str(number), part


def build_chunks(
    chunks: dict[str, Any] | str | None, data: list[Any] | str | None, chunk_size: int | None
) -> ChunkSource:
    """The parts that these parameters stand for. Raises ConfigurationError."""
    if (chunks is None) == (data is None):
        raise ConfigurationError("pass chunks (data by id), or data with chunk_size: one of the two")
    if data is None and chunk_size is not None:
        raise ConfigurationError("chunk_size goes with data: the chunks are given as they are")
    if data is not None and chunk_size is None:
        raise ConfigurationError("chunk_size is missing: say how many items of the data make a chunk")
    if isinstance(chunks, str):
        found: ChunkSource = _FileChunks(chunks)
    elif chunks is not None:
        found = _MappedChunks(normalize_chunk_ids(chunks))
    else:
        assert data is not None
        assert chunk_size is not None
        found = _SlicedChunks(FileRows(data) if isinstance(data, str) else data, chunk_size)
    if not len(found):
        raise ConfigurationError("there are no chunks: the data is empty")
    return found


def normalize_chunk_ids(chunks: dict[Any, Any]) -> dict[str, Any]:
    """The chunks with ids that are text, as JSON has them. Raises ConfigurationError where two become one."""
    found = {normalize_chunk_id(name): value for name, value in chunks.items()}
    if len(found) < len(chunks):
        raise ConfigurationError("two chunks have the same id once ids are text, such as 1 and '1': rename one")
    return found


def normalize_chunk_id(value: Any) -> str:
    """An id as text. Raises ConfigurationError for what is neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigurationError(f"{value!r} is no chunk id: ids are text or whole numbers")
    return str(value)
