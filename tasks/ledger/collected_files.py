"""The collected files of executions, beside their ledger: `files/<index>/` below the results.

An attempt's files are collected in a temporary directory, which is moved to its place when it is complete. The move
replaces no files: if another run has used the place, the directory's name gets a number, as in `files/7-2`.
"""

import asyncio
import itertools
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.cancellation import run_shielded
from ...sandbox.meta import Meta

FOLDER_NAME = "files"


class CollectedFilesStore:
    """The collected files of a ledger, on this machine or at a location."""

    def __init__(self, ledger: PathOrLocation) -> None:
        self._folder = ledger / FOLDER_NAME
        self._provisional: dict[str, PathOrLocation] = {}  # places of attempts that may be repeated, by name
        self._reserve: int | None = None  # bytes of the disk that the run's files leave free

    @asynccontextmanager
    async def open_partial(self) -> AsyncIterator[Path]:
        """Yield a local path for the directory of an attempt's files, and delete the directory at the end."""
        if isinstance(self._folder, Location):
            async with open_temporary_folder() as partial:
                yield partial
            return
        partial = self._folder / f".{uuid.uuid4().hex}.partial"
        try:
            yield partial
        finally:
            await _delete(partial)

    def publish(self, partial: Path, name: str, meta: Meta, *, is_final: bool) -> Meta:
        """Move an attempt's files to their place, and delete the files of an earlier attempt that was not final.

        Returns the meta with the files' new paths, or with a note if they cannot be moved: the result matters more.
        """
        earlier = self._provisional.pop(name, None)
        if earlier is not None:
            with suppress(OSError):
                earlier.remove_directory() if isinstance(earlier, Location) else shutil.rmtree(earlier)
        if not meta.collected:
            return meta
        try:
            self._check_room(partial)
            place = self._put(partial, name)
        except OSError as error:
            problem = (
                f"{len(meta.collected):,} collected files could not be written to {self._folder}: "
                f"{error.strerror or error}"
            )
            return replace(meta, collected=(), not_collected=(*meta.not_collected, problem))
        if not is_final:
            self._provisional[name] = place
        paths = (f"{place}{path[len(str(partial)) :]}" for path in meta.collected)
        return replace(meta, collected=tuple(paths))

    def _check_room(self, partial: Path) -> None:
        """Raise OSError if half of the disk space that was free before the first file is used up."""
        if isinstance(self._folder, Location):
            return
        free = shutil.disk_usage(partial).free
        if self._reserve is None:
            self._reserve = free // 2
        if free < self._reserve:
            raise OSError("a run's collected files may take half of the free disk. Keep large files on a volume")

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
                    if not place.exists():  # Another run has not taken the place, so the disk failed.
                        raise
        raise AssertionError


@asynccontextmanager
async def open_temporary_folder() -> AsyncIterator[Path]:
    """Yield a new temporary folder, and delete it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rlm-batch-files-"))
    try:
        yield folder
    finally:
        await _delete(folder)


async def _delete(folder: Path) -> None:
    if folder.exists():
        await run_shielded(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
