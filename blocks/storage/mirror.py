"""Copies on this machine of files at a location."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from .location import PIECE_BYTES, Location

MAX_BATCH_BYTES = 32 * 1024 * 1024  # that are fetched together, where they are of several files


class LocalMirror:
    """Copies on this machine of the files below a location, brought up to date as they grow there.

    They are in a temporary directory, which goes when nobody has this object any more.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._sizes: dict[str, int] = {}

    @property
    def folder(self) -> Path:
        """Where they are."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rlm-batch-copies-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def refresh(self, pattern: str) -> list[Path]:
        """The copies of the files that match, sorted; what is new is fetched, and nothing else. Raises OSError.

        One listing, and a request for each file that has grown.
        """
        with self._lock:
            sizes = self._location.list_sizes(pattern)
            ranges: list[tuple[str, int, int]] = []
            for name, size in sizes.items():
                start = self._sizes.get(name, 0)
                while start < size:  # no more than a bounded piece of a file at one time
                    ranges.append((name, start, min(size, start + PIECE_BYTES)))
                    start += PIECE_BYTES
            for group in _batch_ranges(ranges):
                for (name, start, _), data in zip(group, self._location.read_ranges(group), strict=True):
                    if start != self._sizes.get(name, 0):
                        continue  # it was cut short since it was listed
                    with open(self.folder / name, "ab") as file:
                        file.truncate(start)
                        file.write(data)
                    self._sizes[name] = start + len(data)
            return [self.folder / name for name in sizes if name in self._sizes]

    def fetch_file(self) -> Path:
        """The copy of the location itself, which is a file. Raises OSError."""
        with self._lock:
            if "" not in self._sizes:
                with self._location.open() as source, open(self.folder / "file", "wb") as file:
                    shutil.copyfileobj(source, file, PIECE_BYTES)
                    self._sizes[""] = file.tell()
        return self.folder / "file"


def _batch_ranges(ranges: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    group: list[tuple[str, int, int]] = []
    size_of_group = 0
    for item in ranges:
        size = item[2] - item[1]
        if group and size_of_group + size > MAX_BATCH_BYTES:
            yield group
            group, size_of_group = [], 0
        group.append(item)
        size_of_group += size
    if group:
        yield group
