"""Volumes, and the uncommitted copies of them that sandboxes use."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from pathlib import Path


class Volume:
    """A volume with its committed files."""

    def __init__(self, number: str, name: str, version: int, folder: Path) -> None:
        self.id, self.name, self.version, self.folder = number, name, version, folder
        self.lock, self.created_at = threading.Lock(), time.time()
        folder.mkdir(parents=True)


class Mount:
    """A sandbox's private copy of a volume."""

    def __init__(self, volume: Volume, path: str, folder: Path) -> None:
        self.volume, self.path, self.folder = volume, path, folder
        with volume.lock:
            shutil.copytree(volume.folder, folder, symlinks=True)
        self._seen = self._state(folder)

    @staticmethod
    def _state(folder: Path) -> dict[str, tuple[int, ...]]:
        entries: dict[str, tuple[int, ...]] = {}
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                stat = path.lstat()
                if not path.is_dir() or path.is_symlink():
                    entries[str(path.relative_to(folder))] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return entries

    @staticmethod
    def _put(source: Path, folder: Path, name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")  # no reader looks here
        shutil.copy2(source, beside, follow_symlinks=False)
        os.replace(beside, target)

    def commit(self) -> list[str]:
        """Push local changes since the last commit, and return their names; the last writer of a file wins."""
        with self.volume.lock:
            now = self._state(self.folder)
            changed = sorted(name for name, state in now.items() if self._seen.get(name) != state)
            for name in changed:
                with contextlib.suppress(FileNotFoundError):  # the file was removed meanwhile
                    self._put(self.folder / name, self.volume.folder, name)
            for name in self._seen.keys() - now.keys():
                (self.volume.folder / name).unlink(missing_ok=True)
            self._seen = now
            return changed

    def reload(self) -> None:
        """Fetch other sandboxes' commits, except for files that were changed here since."""
        with self.volume.lock:
            seen, now, theirs = self._seen, self._state(self.folder), self._state(self.volume.folder)
            mine = {name for name, state in now.items() if seen.get(name) != state}
            mine |= seen.keys() - now.keys()  # a local removal is a change too
            for name in theirs.keys() - mine:
                self._put(self.volume.folder / name, self.folder, name)
            for name in now.keys() - theirs.keys() - mine:
                (self.folder / name).unlink(missing_ok=True)
            fresh = self._state(self.folder)
            unchanged = {name: state for name, state in fresh.items() if name not in mine}
            self._seen = unchanged | {name: seen[name] for name in mine if name in seen}
