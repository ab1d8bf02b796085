"""The command `prune`: deletes old ledgers and old folders of the cache, after a question."""

import sys
import time
from datetime import timedelta
from typing import Annotated, Any

from cyclopts import Parameter

from ..blocks.host_files.cache import resolve_cache_root
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.retention import KeptFolder, OldFolder, delete_folder, list_old_folders, remove_remains
from .output import Flag, Json, confirm, count, print_json, print_table


def prune(
    *,
    older_than: Annotated[timedelta, Parameter(metavar="AGE")],
    dry_run: Flag = False,
    yes: Flag = False,
    json: Json = False,
) -> int:
    """Delete unused results and folders of the cache. Return 1 if one of them could not be deleted.

    Args:
        older_than: Age since the last change of results, or the last use of a folder of the cache: 30d, 12h, 45m or 90s
        dry_run: Show what would be deleted, and delete nothing
        yes: Delete without a question

    Raises:
        ConfigurationError: The age is wrong, or the person at the terminal did not agree. Nothing is deleted then.
    """
    if older_than < timedelta(0):
        raise ConfigurationError("--older-than is negative: give an age such as 30d, 12h, 45m or 90s")
    if json and not (yes or dry_run):
        raise ConfigurationError("--json asks no question: add --yes to delete, or --dry-run to list")
    before = time.time() - older_than.total_seconds()
    root, cache = get_results_root(), resolve_cache_root()
    old: list[OldFolder] = []
    kept: list[KeptFolder] = []
    for folder in list_old_folders(root, cache, before):
        if isinstance(folder, OldFolder):
            old.append(folder)
        else:
            kept.append(folder)
    if old and not json:
        print_table([["what", "name", "last used (UTC)", "size"], *map(_format_row, old)], len(old))
    size = sum(folder.size_bytes for folder in old)
    if old and not yes and not dry_run:
        refusal = "nothing was deleted: --yes deletes without a question, --dry-run only lists"
        confirm(f"Delete {_describe_all(old)}, {_format_size(size)}?", refusal)
    if dry_run:
        listed = old
        summary = f"would delete {_describe_all(old)}, {_format_size(size)}"
    else:
        listed = []
        freed = 0
        for folder in old:
            result = delete_folder(folder)
            if isinstance(result, KeptFolder):
                kept.append(result)
            else:
                freed += result
                listed.append(folder)
        remove_remains(root, cache, before)
        summary = f"deleted {_describe_all(listed)}, {_format_size(freed)} freed"
    if json:
        for folder in listed:
            print_json(_describe(folder, is_deleted=not dry_run))
    for folder in kept:
        print(f"stays: {escape_text(str(folder.path))}, because {escape_text(folder.reason)}", file=sys.stderr)
    print(summary, file=sys.stderr if json else sys.stdout)
    return 0 if len(listed) == len(old) else 1


def _format_row(folder: OldFolder) -> list[str]:
    kind, name = "cache", str(folder.path.relative_to(folder.root))
    if folder.record is not None:
        kind, name = "run", f"{folder.record.flow} {folder.record.name or folder.path.name}"
    used = time.strftime("%Y-%m-%d", time.gmtime(folder.used_at))
    return [kind, name, used, _format_size(folder.size_bytes)]


def _describe(folder: OldFolder, *, is_deleted: bool) -> dict[str, Any]:
    return {
        "kind": "cache" if folder.record is None else "run",
        "path": str(folder.path),
        "name": None if folder.record is None else folder.record.name,
        "used_at": folder.used_at,
        "bytes": folder.size_bytes,
        "deleted": is_deleted,
    }


def _describe_all(folders: list[OldFolder]) -> str:
    runs = sum(folder.record is not None for folder in folders)
    return f"{count(runs, 'run')} and {count(len(folders) - runs, 'folder')} of the cache"


def _format_size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
