"""The files that executions have brought home, beside their ledger: `files/<index>/` below the results.

What an attempt brings is gathered in a directory of its own, and stands in its place once all of it is there. Nothing
that is there already is replaced: where another run has had the place, its name gets a number, as in `files/7-2`.
"""

import itertools
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.meta import Meta

FOLDER_NAME = "files"


class CollectedFilesStore:
    """Where the collected files of a ledger are, on this machine or at a location."""

    def __init__(self, ledger: PathOrLocation) -> None:
        self._folder = ledger / FOLDER_NAME
        self._provisional: dict[str, PathOrLocation] = {}  # of attempts that another may follow, by their names

    @contextmanager
    def open_partial(self) -> Iterator[Path]:
        """A directory on this machine for what an attempt brings, which need not be made; it is gone afterwards."""
        if isinstance(self._folder, Location):
            with tempfile.TemporaryDirectory(prefix="rlm-batch-files-") as folder:
                yield Path(folder)
            return
        partial = self._folder / f".{uuid.uuid4().hex}.partial"
        try:
            yield partial
        finally:
            if partial.exists():
                shutil.rmtree(partial, ignore_errors=True)

    def publish(self, partial: Path, name: str, meta: Meta, *, is_final: bool) -> Meta:
        """Puts what an attempt has brought in its place, under that name; the meta, with the paths of the files there.

        What an attempt before it that was not final has left goes. Where the files cannot be put there the meta says
        so: they are not worth an execution's result.
        """
        earlier = self._provisional.pop(name, None)
        if earlier is not None:
            with suppress(OSError):
                _remove(earlier)
        if not meta.collected:
            return meta
        try:
            place = self._put(partial, name)
        except OSError as error:
            problem = f"{len(meta.collected):,} files could not be put into {self._folder}: {error.strerror or error}"
            return replace(meta, collected=(), not_collected=(*meta.not_collected, problem))
        if not is_final:
            self._provisional[name] = place
        paths = (f"{place}{path[len(str(partial)) :]}" for path in meta.collected)
        return replace(meta, collected=tuple(paths))

    def _put(self, partial: Path, name: str) -> PathOrLocation:
        for number in itertools.count(1):
            place = self._folder / (name if number == 1 else f"{name}-{number}")
            if isinstance(place, Location):
                if not place.has_files():
                    place.upload_directory(partial)
                    return place
            elif not place.exists():
                try:
                    partial.rename(place)
                    return place
                except OSError:
                    if not place.exists():  # or another has just taken it
                        raise
        raise AssertionError


def _remove(place: PathOrLocation) -> None:
    if isinstance(place, Location):
        place.remove_directory()
    else:
        shutil.rmtree(place)
