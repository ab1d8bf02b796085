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
        self._provisional: dict[str, PathOrLocation] = {}  # folders of attempts that may be repeated, by name
        self._reserved_bytes: int | None = None  # bytes of the disk that the run's files leave free

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
        """Move an attempt's files to the folder with that name, and delete those of an earlier attempt.

        The files of an earlier attempt with `is_final` stay. Returns the meta with the files' new paths, or with a note
        if they cannot be moved: the result matters more.
        """
        earlier = self._provisional.pop(name, None)
        with suppress(OSError):
            if isinstance(earlier, Location):
                earlier.remove_directory()
            elif earlier is not None:
                shutil.rmtree(earlier)
        if not meta.collected:
            return meta
        try:
            self._check_free_disk(partial)
            folder = self._move(partial, name)
        except OSError as error:
            problem = (
                f"{len(meta.collected):,} collected files could not be written to {self._folder}: "
                f"{error.strerror or error}"
            )
            return replace(meta, collected=(), not_collected=(*meta.not_collected, problem))
        if not is_final:
            self._provisional[name] = folder
        paths = tuple(path.replace(str(partial), str(folder), 1) for path in meta.collected)
        return replace(meta, collected=paths)

    def _check_free_disk(self, partial: Path) -> None:
        """Raise OSError if half of the disk space that was free before the first file is used up."""
        if isinstance(self._folder, Location):
            return
        free_bytes = shutil.disk_usage(partial).free
        if self._reserved_bytes is None:
            self._reserved_bytes = free_bytes // 2
        if free_bytes < self._reserved_bytes:
            raise OSError("a run's collected files may take half of the free disk. Keep large files on a volume")

    def _move(self, partial: Path, name: str) -> PathOrLocation:
        """Move the files to the first free folder of NAME, NAME-2, NAME-3, …, and return this folder."""
        for number in itertools.count(1):
            folder = self._folder / (name if number == 1 else f"{name}-{number}")
            if isinstance(folder, Location):
                if not folder.has_files():
                    folder.upload_directory(partial)
                    return folder
            elif not folder.exists():
                try:
                    partial.rename(folder)
                    return folder
                except OSError:
                    if not folder.exists():
                        raise
                    # Another run has made the folder meanwhile, so try the next one.
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
