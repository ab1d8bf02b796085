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
        if path.is_symlink():
            yield KeptFolder(path, "it is a link")
            continue
        size_bytes, changed_at = _measure(path)
        if changed_at >= before:
            continue
        with claim_idle_ledger(path) as is_idle:
            pass  # The lock must not last while the caller looks at the folder.
        foreign = [name for name in os.listdir(path) if not any(fnmatch.fnmatch(name, ours) for ours in LEDGER_NAMES)]
        if not is_idle:
            yield KeptFolder(path, "a run uses it")
        elif foreign:
            yield KeptFolder(path, f"rlm-batch did not write {foreign[0]!r} in it")
        else:
            yield OldFolder(root, path, changed_at, size_bytes, record)
    for path, used_at in list_cached_folders():
        if used_at < before:
            with claim_idle_ledger(path) as is_idle:
                pass  # The lock must not last while the caller looks at the folder.
            folder = OldFolder(cache, path, used_at, _measure(path)[0])
            yield folder if is_idle else KeptFolder(path, "a run uses it")


def delete_folder(folder: OldFolder) -> int | KeptFolder:
    """Delete a folder if nothing has used it since it was listed. Return the freed bytes, or why it stays."""
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
    """Delete what no run needs besides the old folders.

    These are the rest of folders whose deletion was interrupted, old records of ledgers elsewhere that are gone, and
    files of long parameters that no run has started with since `before`.
    """
    for folder in (root / DELETED, cache / DELETED):
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    existing = {record.id for record in read_known_runs(root).records}
    records = [path for path in root.glob(PATTERN) if path.stem.removeprefix("run-") not in existing]
    parameters = [path for path in get_spill_directory().glob("*") if SPILLED_FILE.fullmatch(path.name)]
    for path in records + parameters:
        if not path.is_symlink() and path.is_file() and path.lstat().st_mtime < before:
            path.unlink(missing_ok=True)


def _measure(folder: Path) -> tuple[int, float]:
    """Return the bytes that a folder takes on the disk, and its last change. Links are not followed."""
    states: list[os.stat_result] = []
    for directory, _, names in os.walk(folder):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with suppress(OSError):
                states.append(os.lstat(path))
    return sum(state.st_blocks for state in states) * 512, max((state.st_mtime for state in states), default=0.0)
