"""Repair of the folders that a sandbox's executions share: each execution finds them as at the sandbox's start."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

REPAIR_SECONDS = 60.0  # time for the repair process, which may remove many files
# This shell program also empties directories that its user has closed. It discards its output: nothing reads the pipe,
# and a full pipe would block it.
REMOVER = 'exec >/dev/null 2>&1; rm -rf -- "$@" || { chmod -R u+rwX -- "$@"; rm -rf -- "$@"; }'
REMOVED_AT_ONCE = 1000  # paths per call; the kernel limits a program's arguments to 2 MiB by default


class SharedFolders:
    """The state of the working folder, the home and the folder for temporary files at the sandbox's start.

    Executions share the files of the working folder on purpose, but not those that they leave in `temporary` folders.
    """

    def __init__(self, folder: str, temporary: Iterable[str]) -> None:
        self._folder = folder
        self._temporary = tuple(temporary)
        self._kept: dict[str, set[str]] = {}  # names to keep, by temporary folder
        self._is_idle = False
        paths = dict.fromkeys((folder, os.environ.get("TMPDIR", "/tmp"), os.environ.get("HOME", folder)))
        self._states = {path: state for path in paths if (state := self._read_state(path)) is not None}

    def note_contents(self) -> None:
        """Record the contents of the temporary folders, which `repair` keeps."""
        self._kept = {path: set(_list_names(path)) for path in self._temporary}

    def is_damaged(self, *, is_idle: bool) -> bool:
        """Return whether `repair` has work. If the sandbox `is_idle`, all new temporary files count as leftovers."""
        self._is_idle = is_idle
        return bool(self._list_changed() or self._list_left())

    def repair(self) -> None:
        """Undo the damage with the code's user id. Call this in a separate process that exits afterwards."""
        for path in self._list_changed():
            try:
                if path != self._folder and not os.path.lexists(path):
                    os.mkdir(path)
                os.chmod(path, self._states[path][0] & 0o7777)
            except OSError:
                pass  # the caller checks again
        left = self._list_left()
        for start in range(0, len(left), REMOVED_AT_ONCE):
            paths = left[start : start + REMOVED_AT_ONCE]
            os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", REMOVER, "rm", *paths], os.environ), 0)

    def describe_damage(self) -> str:
        changed = self._list_changed()
        if self._folder in changed:
            return f"an earlier execution removed or closed its working folder ({self._folder})"
        damaged = [*changed, *self._list_left()]
        return f"earlier executions' changes to {damaged[0]} could not be undone" if damaged else ""

    def _list_changed(self) -> list[str]:
        return [path for path, state in self._states.items() if self._read_state(path) != state]

    def _list_left(self) -> list[str]:
        all_kept = self._kept if self._is_idle else {}
        return [f"{path}/{name}" for path, kept in all_kept.items() for name in _list_names(path) if name not in kept]

    def _read_state(self, path: str) -> tuple[Any, ...] | None:
        """Return a folder's mode and owner, plus device and inode for the working folder; None if it is missing."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        state = status.st_mode, status.st_uid, status.st_gid
        return (*state, status.st_dev, status.st_ino) if path == self._folder else state


def _list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
