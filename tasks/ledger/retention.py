"""The deletion of old ledgers, and of old folders of the cache.

Only folders that rlm-batch made are deleted: ledgers directly below the results root, and folders of the cache. A
folder that is in use, or has files of another origin, stays. Links are never followed.
"""

import fnmatch
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...blocks.host_files.cache import list_cached_folders
from .collected_files import FOLDER_NAME as COLLECTED
from .ledger import claim_idle_ledger
from .run_record import PATTERN, RunRecord, read_known_runs

# What rlm-batch writes into a ledger's folder.
LEDGER_NAMES = (
    PATTERN, "part-*.jsonl", "answers-*.jsonl", "requests-*.jsonl", "result-*.json", "report.html", "shards", COLLECTED,
    ".*.partial",
)  # fmt: skip
DELETED = ".deleted"  # Folders are moved here before they are deleted. Readers of the results root skip it.


@dataclass(frozen=True, slots=True)
class OldFolder:
    """A folder that may be deleted: a ledger with its last run, or a folder of the cache, whose `record` is None.

    `used_at` is in epoch seconds: the last change of a ledger, or the last use of a folder of the cache.
    """

    root: Path
    path: Path
    used_at: float
    size_bytes: int
    record: RunRecord | None = None


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """An old folder that stays, and why."""

    path: Path
    reason: str


def list_old_folders(root: Path, cache: Path, before: float) -> Iterator[OldFolder | KeptFolder]:
    """Yield the ledgers below the results root and the folders of the cache that nothing has used since a time.

    Args:
        root: The results root.
        cache: The root of the cache.
        before: The time, in epoch seconds.
    """
    known = read_known_runs(root)
    for record in reversed(known.list_latest()):
        path = Path(record.results_path)
        if path.parent != root or record.began >= before or (record.ended or 0.0) >= before:
            continue
        folder = _inspect_ledger(root, path, before, record)
        if folder is not None:
            yield folder
    for cached in list_cached_folders():
        if cached.used_at >= before:
            continue
        with claim_idle_ledger(cached.path) as is_idle:
            pass  # The lock must not last while the caller looks at the folder.
        if is_idle:
            yield OldFolder(cache, cached.path, cached.used_at, _Contents(cached.path).size_bytes)
        else:
            yield KeptFolder(cached.path, "a run uses it")


def delete_folder(folder: OldFolder) -> int | KeptFolder:
    """Delete a folder if nothing has used it since it was listed. Return the freed bytes, or why it stays."""
    with claim_idle_ledger(folder.path) as is_idle:
        if not is_idle:
            return KeptFolder(folder.path, "a run uses it")
        contents = _Contents(folder.path)
        used_at = contents.changed_at if folder.record is not None else folder.path.stat().st_mtime
        if used_at > folder.used_at:
            return KeptFolder(folder.path, "it has changed")
        try:
            target = folder.root / DELETED / uuid.uuid4().hex
            target.parent.mkdir(exist_ok=True)
            # A run must not find half a folder of the cache. From here on a run that wants the folder makes a new one.
            os.rename(folder.path, target)
        except OSError as error:
            return KeptFolder(folder.path, f"it cannot be deleted ({error.strerror})")
    try:
        shutil.rmtree(target)
    except OSError as error:
        return KeptFolder(target, f"not all of it could be deleted ({error.strerror})")
    return contents.size_bytes


def remove_remains(root: Path, cache: Path, before: float) -> None:
    """Delete the rest of folders whose deletion was interrupted, and old records of ledgers elsewhere that are gone."""
    for folder in (root / DELETED, cache / DELETED):
        if not folder.is_symlink() and folder.is_dir():
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()
    existing = {record.id for record in read_known_runs(root).records}
    for path in root.glob(PATTERN):
        with suppress(OSError):
            state = path.lstat()
            is_gone = path.stem.removeprefix("run-") not in existing
            if is_gone and stat.S_ISREG(state.st_mode) and state.st_mtime < before:
                path.unlink()


def _inspect_ledger(root: Path, path: Path, before: float, record: RunRecord) -> OldFolder | KeptFolder | None:
    """Return a ledger that may be deleted, or why an old one stays; None if it has changed since `before`."""
    if path.is_symlink():
        return KeptFolder(path, "it is a link")
    contents = _Contents(path)
    if contents.changed_at >= before:
        return None
    with claim_idle_ledger(path) as is_idle:
        if not is_idle:
            return KeptFolder(path, "a run uses it")
    foreign = [name for name in contents.names if not any(fnmatch.fnmatch(name, known) for known in LEDGER_NAMES)]
    if foreign:
        return KeptFolder(path, f"rlm-batch did not write {foreign[0]!r} in it")
    return OldFolder(root, path, contents.changed_at, contents.size_bytes, record)


class _Contents:
    """The contents of a folder, without following links."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self.size_bytes = 0
        self.changed_at = 0.0
        for directory, folders, names in os.walk(folder):
            if directory == str(folder):
                self.names = [*folders, *names]
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                with suppress(OSError):
                    state = os.lstat(path)
                    self.size_bytes += state.st_blocks * 512
                    self.changed_at = max(self.changed_at, state.st_mtime)
