"""Copies on this machine of files at a location."""

import shutil
import tempfile
import threading
import weakref
from functools import cached_property
from pathlib import Path

from .location import Location

PIECE_BYTES = 1024 * 1024  # the size of one request
PIECES = 32  # requests that run together


class LocalMirror:
    """Copies on this machine of the files below a location. `refresh` updates them as the files grow.

    The copies are in a temporary directory, which is deleted with this object.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    @cached_property
    def folder(self) -> Path:
        """Return the directory of the copies, created at the first call."""
        folder = Path(tempfile.mkdtemp(prefix="rlm-batch-copies-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def refresh(self, pattern: str) -> list[Path]:
        """Fetch what is new in the matching files, and return the sorted paths of their copies. Raises OSError.

        It makes one listing, and at least one request for each file that has grown.
        """
        with self._lock:
            sizes = self._location.list_sizes(pattern)
            ranges = [
                (name, start, min(size, start + PIECE_BYTES))
                for name, size in sizes.items()
                for start in range(self._sizes.get(name, 0), size, PIECE_BYTES)
            ]
            for first in range(0, len(ranges), PIECES):
                group = ranges[first : first + PIECES]
                for (name, start, _), data in zip(group, self._location.read_ranges(group), strict=True):
                    if start != self._sizes.get(name, 0):
                        continue  # An earlier piece was short: the file shrank after the listing.
                    with open(self.folder / name, "ab") as file:
                        file.truncate(start)
                        file.write(data)
                    self._sizes[name] = start + len(data)
            return [self.folder / name for name in sizes if name in self._sizes]
