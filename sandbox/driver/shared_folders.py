"""The folders that the executions of a sandbox share: what one has done to them is undone before the next begins."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

REPAIR_SECONDS = 10.0  # for a process to put the folders right, before the sandbox is given up
REMOVER = 'rm -rf -- "$@" || { chmod -R u+rwX -- "$@"; rm -rf -- "$@"; }'  # also what is closed to its own user


class SharedFolders:
    """The working folder, the home and the folder for temporary files, as they were when the sandbox started.

    Files of the working folder are shared on purpose. Those that an execution leaves in `temporary` folders are not.
    """

    def __init__(self, folder: str, temporary: Iterable[str]) -> None:
        self._folder = folder
        self._temporary = tuple(temporary)
        self._kept: dict[str, set[str]] = {}  # what was in those before an execution
        paths = dict.fromkeys((folder, os.environ.get("TMPDIR", "/tmp"), os.environ.get("HOME", folder)))
        self._states = {path: state for path in paths if (state := self._read_state(path)) is not None}

    def note_contents(self) -> None:
        """Takes what is in the temporary folders now for what is to stay there."""
        self._kept = {path: set(_list_names(path)) for path in self._temporary}

    def is_damaged(self, *, is_idle: bool) -> bool:
        """Whether there is something to undo. In a sandbox that `is_idle` nothing that runs needs temporary files."""
        return bool(self._list_changed() or (is_idle and self._list_left()))

    def repair(self) -> None:
        """Undoes it, as the code's own user: for a process of its own, which ends with this."""
        for path in self._list_changed():
            try:
                if path != self._folder and not os.path.lexists(path):
                    os.mkdir(path)
                os.chmod(path, self._states[path][0] & 0o7777)
            except OSError:
                pass  # who has asked for this looks again
        left = self._list_left()
        if left:
            os.execv("/bin/sh", ["sh", "-c", REMOVER, "rm", *left])

    def describe_damage(self) -> str:
        """What could not be undone; empty where all is well."""
        changed = self._list_changed()
        if self._folder in changed:
            return f"an earlier execution has removed or closed its working folder ({self._folder})"
        damaged = [*changed, *self._list_left()]
        return f"what earlier executions have done to {damaged[0]} could not be undone" if damaged else ""

    def _list_changed(self) -> list[str]:
        return [path for path, state in self._states.items() if self._read_state(path) != state]

    def _list_left(self) -> list[str]:
        return [f"{path}/{name}" for path, kept in self._kept.items() for name in _list_names(path) if name not in kept]

    def _read_state(self, path: str) -> tuple[Any, ...] | None:
        """The folder's mode and owner, and of the working folder which one it is; None where there is none."""
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
