"""Repair of the folders that a sandbox's executions share: each execution finds them as at the sandbox's start."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .child_process import ChildSource

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
        self._states: dict[str, tuple[Any, ...]] = {}
        for path in (folder, os.environ.get("TMPDIR", "/tmp"), os.environ.get("HOME", folder)):
            state = self._read_state(path)
            if state is not None:
                self._states[path] = state

    def note_contents(self) -> None:
        """Record the contents of the temporary folders, which `restore` keeps."""
        self._kept = {path: set(_list_names(path)) for path in self._temporary}

    def restore(self, source: ChildSource, *, is_idle: bool) -> str:
        """Undo damage to the folders in a confined process. Return why that failed, or "".

        New temporary files are deleted if the supervisor `is_idle`: otherwise running executions may use them.
        """
        kept = self._kept if is_idle else {}
        if not self._list_changed() and not _list_new_files(kept):
            return ""
        try:
            source.run(lambda: self._repair(kept), REPAIR_SECONDS)
        except OSError:
            pass  # no process could be made; the damage is still there
        changed = self._list_changed()
        if self._folder in changed:
            return f"an earlier execution removed or closed its working folder ({self._folder})"
        damaged = changed + _list_new_files(kept)
        return f"earlier executions' changes to {damaged[0]} could not be undone" if damaged else ""

    def _repair(self, kept: dict[str, set[str]]) -> None:
        for path in self._list_changed():
            try:
                if path != self._folder and not os.path.lexists(path):
                    os.mkdir(path)
                os.chmod(path, self._states[path][0] & 0o7777)
            except OSError:
                pass  # `restore` checks again
        paths = _list_new_files(kept)
        while paths:
            arguments = ["sh", "-c", REMOVER, "rm", *paths[:REMOVED_AT_ONCE]]
            os.waitpid(os.posix_spawn("/bin/sh", arguments, os.environ), 0)
            del paths[:REMOVED_AT_ONCE]

    def _list_changed(self) -> list[str]:
        """Return the folders whose mode, owner or identity differs from the start."""
        return [path for path, state in self._states.items() if self._read_state(path) != state]

    def _read_state(self, path: str) -> tuple[Any, ...] | None:
        """Return a folder's mode and owner, plus device and inode for the working folder; None if it is missing."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        state = status.st_mode, status.st_uid, status.st_gid
        return (*state, status.st_dev, status.st_ino) if path == self._folder else state


def _list_new_files(kept: dict[str, set[str]]) -> list[str]:
    """Return the paths of the files that were added to these folders. `kept` has the earlier names by folder."""
    paths: list[str] = []
    for folder, names in kept.items():
        paths += [f"{folder}/{name}" for name in _list_names(folder) if name not in names]
    return paths


def _list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
