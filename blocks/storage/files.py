"""Reading and writing whole files, be they on this machine or at a location."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .location import Location, PathOrLocation


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to: it replaces `path` when the block ends, and is gone after an error."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: PathOrLocation, data: bytes | Iterable[bytes]) -> None:
    """Writes a file whole or not at all, with the directories above it; pieces are not held together. Raises OSError.

    On this machine it is written beside its place and renamed. At a location that is no object store a reader may see
    a part of it while it is written.
    """
    pieces: Iterable[bytes] = [data] if isinstance(data, bytes) else data
    if isinstance(path, Location):
        if isinstance(data, bytes):
            path.write(data)
            return
        handle, name = tempfile.mkstemp(prefix="rlm-batch-copy-")
        try:
            with open(handle, "wb") as file:
                file.writelines(pieces)
            path.write_from_file(Path(name))
        finally:
            os.unlink(name)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as partial, partial.open("wb") as file:
        file.writelines(pieces)


def read_file(path: PathOrLocation) -> bytes:
    """All that a file has. Raises OSError."""
    return path.read() if isinstance(path, Location) else path.read_bytes()


def iterate_lines(path: PathOrLocation) -> Iterator[bytes]:
    """The lines of a file, each with its end, as a stream. Raises OSError."""
    with path.open() if isinstance(path, Location) else path.open("rb") as file:
        yield from file


def list_names(directory: PathOrLocation, pattern: str) -> list[str]:
    """The names of the files directly below that match, sorted; empty where there is no directory. Raises OSError."""
    if isinstance(directory, Location):
        return list(directory.list_sizes(pattern))
    return sorted(path.name for path in directory.glob(pattern))
