"""The old ledgers below the results root and the old folders of the cache, and their deletion.

A folder that is in use, or has files of another origin, stays. Links are never followed.
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
from .run_record import PATTERN, RunRecord, read_known_runs

# What rlm-batch writes into a ledger's folder.
LEDGER_NAMES = (
    PATTERN, "part-*.jsonl", "answers-*.jsonl", "requests-*.jsonl", "result-*.json", "report.html", "shards", COLLECTED,
    ".*.partial",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OldFolder:
    """A folder that may be deleted: a ledger with its last run, or a folder of the cache, whose `record` is None.

    `used_at` is in epoch seconds: the last change in a ledger, or the last use of a folder of the cache.
    """

    path: Path
    used_at: float
    size_bytes: int
    record: RunRecord | None = None


def list_old_ledgers(root: Path, before: float) -> Iterator[OldFolder]:
    """Yield the ledgers directly below the results root that nothing has used since a time in epoch seconds."""
    for record in reversed(read_known_runs(root).list_latest()):
        path = Path(record.results_path)
        if path.parent != root or max(record.began, record.ended or 0.0) >= before or not _is_idle(path):
            continue
        ledger = _measure(path, record)
        if ledger.used_at < before and all(map(_is_ours, os.listdir(path))):
            yield ledger


def list_old_cache(before: float) -> Iterator[OldFolder]:
    """Yield the folders of the cache that no run has used since a time in epoch seconds."""
    for cached in list_cached_folders():
        if cached.used_at < before and _is_idle(cached.path):
            yield _measure(cached.path)


def delete_folder(folder: OldFolder) -> bool:
    """Delete a folder. Return False if something has used it since it was listed. Raises OSError."""
    with claim_idle_ledger(folder.path) as is_idle:
        if not is_idle or _measure(folder.path, folder.record) != folder:
            return False
        # Half a folder of the cache must have another name, even if this process is killed now.
        half = folder.path.rename(folder.path.with_name(f".{uuid.uuid4().hex}.partial"))
    shutil.rmtree(half)
    return True


def _is_idle(path: Path) -> bool:
    with claim_idle_ledger(path) as is_idle:
        return is_idle


def _is_ours(name: str) -> bool:
    return any(fnmatch.fnmatch(name, known) for known in LEDGER_NAMES)


def _measure(path: Path, record: RunRecord | None = None) -> OldFolder:
    size_bytes, changed_at = 0, 0.0
    for directory, _, names in os.walk(path):
        for item in (directory, *(os.path.join(directory, name) for name in names)):
            with suppress(OSError):
                status = os.lstat(item)
                size_bytes += status.st_blocks * 512
                changed_at = max(changed_at, status.st_mtime)
    return OldFolder(path, changed_at if record is not None else path.stat().st_mtime, size_bytes, record)
