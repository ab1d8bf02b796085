"""Copies on this machine of files at a location."""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from .location import Location

PIECE_BYTES = 8 * 1024 * 1024  # of a file that are fetched at one time
MAX_BATCH_BYTES = 32 * 1024 * 1024  # that are fetched together, where they are of several files


class LocalMirror:
    """Copies on this machine of the files below a location, brought up to date as they grow there.

    They are in a temporary directory, which goes when nobody has this object any more.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    @cached_property
    def folder(self) -> Path:
        """Where they are."""
        folder = Path(tempfile.mkdtemp(prefix="rlm-batch-copies-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def refresh(self, pattern: str) -> list[Path]:
        """The copies of the files that match, sorted; what is new is fetched, and nothing else. Raises OSError.

        One listing, and a request for each file that has grown.
        """
        with self._lock:
            sizes = self._location.list_sizes(pattern)
            ranges = [
                (name, start, min(size, start + PIECE_BYTES))
                for name, size in sizes.items()
                for start in range(self._sizes.get(name, 0), size, PIECE_BYTES)
            ]
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
        try:
            self._location.download(self.folder / "file")
        except OSError:
            shutil.rmtree(self.folder)  # not when this object goes: whoever holds the error has it too
            raise
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
