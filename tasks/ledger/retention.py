"""The deletion of old ledgers, and of old folders of the cache.

Only folders that rlm-batch made are deleted: ledgers directly below the results root, and folders of the cache. A
folder that is in use, or has files of another origin, stays. Links are never followed.
"""

import fnmatch
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...blocks.host_files.cache import list_cached_folders
from .collected_files import FOLDER_NAME as COLLECTED
from .ledger import claim_idle_ledger
from .result_index import SPILLED_FILE, get_spill_directory
from .run_record import PATTERN, RunRecord, read_known_runs

# What rlm-batch writes into a ledger's folder.
LEDGER_NAMES = (
    PATTERN, "part-*.jsonl", "answers-*.jsonl", "requests-*.jsonl", "result-*.json", "report.html", "shards", COLLECTED,
    ".*.partial",
)  # fmt: skip
DELETED = ".deleted"  # Folders are moved here before they are deleted. Readers of the results root skip it.
BLOCK_BYTES = 512  # the unit of `st_blocks`


@dataclass(frozen=True, slots=True)
class OldFolder:
    """A ledger or a folder of the cache that may be deleted."""

    root: Path  # the results root, or the root of the cache
    path: Path
    used_at: float  # epoch seconds: the last change of a ledger, or the last use of a folder of the cache
    size_bytes: int
    record: RunRecord | None = None  # the last run of a ledger; None for a folder of the cache


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """An old folder that stays, and the reason."""

    path: Path
    reason: str


def list_old_folders(root: Path, cache: Path, before: float) -> Iterator[OldFolder | KeptFolder]:
    """Yield the ledgers below the results root, and the folders of the cache, that were not used since `before`.

    Args:
        root: The results root.
        cache: The root of the cache.
        before: The time, in epoch seconds.
    """
    for record in reversed(read_known_runs(root).list_latest()):
        path = Path(record.results_path)
        is_recent = record.began >= before or (record.ended or 0.0) >= before
        if is_recent or path.parent != root:
            continue
        if path.is_symlink():
            yield KeptFolder(path, "it is a link")
            continue
        size_bytes, changed_at = _measure(path)
        if changed_at >= before:
            continue
        foreign_name = _find_foreign_name(path)
        if not _is_idle(path):
            yield KeptFolder(path, "a run uses it")
        elif foreign_name is not None:
            yield KeptFolder(path, f"rlm-batch did not write {foreign_name!r} in it")
        else:
            yield OldFolder(root, path, changed_at, size_bytes, record)
    for path, used_at in list_cached_folders():
        if used_at >= before:
            continue
        size_bytes, _ = _measure(path)
        if _is_idle(path):
            yield OldFolder(cache, path, used_at, size_bytes)
        else:
            yield KeptFolder(path, "a run uses it")


def _find_foreign_name(ledger: Path) -> str | None:
    """Return the name of a file in a ledger's folder that rlm-batch did not write; None if there is none."""
    for name in os.listdir(ledger):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in LEDGER_NAMES):
            return name
    return None


def _is_idle(path: Path) -> bool:
    with claim_idle_ledger(path) as is_idle:
        return is_idle


def delete_folder(folder: OldFolder) -> int | KeptFolder:
    """Delete a folder if nothing has used it since it was listed. Return the freed bytes, or the reason if it stays."""
    with claim_idle_ledger(folder.path) as is_idle:
        if not is_idle:
            return KeptFolder(folder.path, "a run uses it")
        size_bytes, changed_at = _measure(folder.path)
        used_at = changed_at if folder.record is not None else folder.path.stat().st_mtime
        if used_at > folder.used_at:
            return KeptFolder(folder.path, "it has changed")
        target = folder.root / DELETED / uuid.uuid4().hex
        try:
            target.parent.mkdir(exist_ok=True)
            # A run must not find half a folder of the cache. From here on a run that wants the folder makes a new one.
            os.rename(folder.path, target)
        except OSError as error:
            return KeptFolder(folder.path, f"it cannot be deleted ({error.strerror})")
    try:
        shutil.rmtree(target)
    except OSError as error:
        return KeptFolder(target, f"not all of it could be deleted ({error.strerror})")
    return size_bytes


def remove_remains(root: Path, cache: Path, before: float) -> None:
    """Delete files that no run needs, in addition to the old folders.

    These are folders whose deletion was interrupted, records of deleted ledgers outside of the root, and long
    parameters. The records and parameters are deleted if they have not changed since `before`.
    """
    for folder in (root / DELETED, cache / DELETED):
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    existing_ids = {record.id for record in read_known_runs(root).records}
    records = [path for path in root.glob(PATTERN) if path.stem.removeprefix("run-") not in existing_ids]
    parameters = [path for path in get_spill_directory().glob("*") if SPILLED_FILE.fullmatch(path.name)]
    for path in records + parameters:
        is_own_file = path.is_file() and not path.is_symlink()
        if is_own_file and path.lstat().st_mtime < before:
            path.unlink(missing_ok=True)


def _measure(folder: Path) -> tuple[int, float]:
    """Return the bytes that a folder takes on the disk, and the time of its last change. Links are not followed."""
    size_bytes, changed_at = 0, 0.0
    for directory, _, names in os.walk(folder):
        for name in (".", *names):
            with suppress(OSError):
                state = os.lstat(os.path.join(directory, name))
                size_bytes += state.st_blocks * BLOCK_BYTES
                changed_at = max(changed_at, state.st_mtime)
    return size_bytes, changed_at
