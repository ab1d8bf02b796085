"""The command `prune`: deletes old ledgers and old folders of the cache, after a question."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..blocks.host_files.cache import resolve_cache_root
from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..tasks.ledger.result_index import get_results_root
from ..tasks.ledger.retention import KeptFolder, OldFolder, delete_folder, list_old_folders, remove_remains
from .output import Flag, Json, print_json, print_table

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def prune(
    *,
    older_than: Annotated[str, Parameter(metavar="AGE")],
    dry_run: Flag = False,
    yes: Flag = False,
    json: Json = False,
) -> int:
    """Delete what nothing has used for that time. Return 1 if something could not be deleted.

    Args:
        older_than: Age since the last change of results, or the last use of a folder of the cache: 30d, 12h, 45m or 90s
        dry_run: Show what would be deleted, and delete nothing
        yes: Delete without a question

    Raises:
        ConfigurationError: The age is wrong, or the person at the terminal did not agree. Nothing is deleted then.
    """
    before = time.time() - parse_age(older_than)
    if json and not (yes or dry_run):
        raise ConfigurationError("--json asks no question: add --yes to delete, or --dry-run to list")
    root, cache = get_results_root(), resolve_cache_root()
    found = list(list_old_folders(root, cache, before))
    old = [folder for folder in found if isinstance(folder, OldFolder)]
    kept = [folder for folder in found if isinstance(folder, KeptFolder)]
    if not json and old:
        print_table([["what", "name", "last used (UTC)", "size"], *map(_format_row, old)], len(old))
    deleted: list[OldFolder] = []
    freed = 0
    if old and not dry_run:
        if not yes:
            _confirm(f"Delete {_count(old)}, {_format_size(_sum_sizes(old))}?")
        for folder in old:
            result = delete_folder(folder)
            if isinstance(result, KeptFolder):
                kept.append(result)
            else:
                freed += result
                deleted.append(folder)
    if not dry_run:
        remove_remains(root, cache, before)
    if json:
        for folder in old if dry_run else deleted:
            print_json(_describe(folder, is_deleted=not dry_run))
    for folder in kept:
        print(f"stays: {escape_text(str(folder.path))}, because {escape_text(folder.reason)}", file=sys.stderr)
    if dry_run:
        text = f"would delete {_count(old)}, {_format_size(_sum_sizes(old))}"
    else:
        text = f"deleted {_count(deleted)}, {_format_size(freed)} freed"
    print(text, file=sys.stderr if json else sys.stdout)
    return 0 if dry_run or len(deleted) == len(old) else 1


def parse_age(text: str) -> float:
    """Return the seconds of an age such as 30d.

    Raises:
        ConfigurationError: The text is no age.
    """
    parts = AGE.fullmatch(text.strip().lower())
    if parts is None:
        raise ConfigurationError(
            f"--older-than {text!r} is no age: give a number with a unit, such as 30d, 12h, 45m or 90s"
        )
    return float(parts[1]) * SECONDS[parts[2]]


def _confirm(question: str) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError("nothing was deleted: --yes deletes without a question, --dry-run only lists")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigurationError("nothing was deleted")


def _format_row(folder: OldFolder) -> list[str]:
    used = time.strftime("%Y-%m-%d", time.gmtime(folder.used_at))
    kind = _get_kind(folder)
    name = (
        str(Path(*folder.path.parts[len(folder.root.parts) :]))
        if folder.record is None
        else f"{folder.record.flow} {folder.record.name or folder.path.name}"
    )
    return [kind, name, used, _format_size(folder.size_bytes)]


def _get_kind(folder: OldFolder) -> str:
    return "cache" if folder.record is None else "run"


def _describe(folder: OldFolder, *, is_deleted: bool) -> dict[str, Any]:
    return {
        "kind": _get_kind(folder),
        "path": str(folder.path),
        "name": None if folder.record is None else folder.record.name,
        "used_at": folder.used_at,
        "bytes": folder.size_bytes,
        "deleted": is_deleted,
    }


def _count(folders: list[OldFolder]) -> str:
    runs = sum(folder.record is not None for folder in folders)
    cached = len(folders) - runs
    return f"{runs:,} run{'' if runs == 1 else 's'} and {cached:,} folder{'' if cached == 1 else 's'} of the cache"


def _sum_sizes(folders: list[OldFolder]) -> int:
    return sum(folder.size_bytes for folder in folders)


def _format_size(size: float) -> str:
    """Return a number of bytes with a unit, such as 1.2 GiB."""
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == UNITS[0] else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {UNITS[-1]}"
