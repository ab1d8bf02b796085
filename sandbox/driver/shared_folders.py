"""The folders that the executions of a sandbox share: what one has done to them is undone before the next begins."""

from __future__ import annotations

import os

from ..wire.names import CODE_FILE_PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

REPAIR_SECONDS = 10.0  # for a process to put the folders right, before the sandbox is given up
# It removes what is closed to its own user, too. Nothing reads what it writes, and a full pipe would stop it.
REMOVER = 'exec >/dev/null 2>&1; rm -rf -- "$@" || { chmod -R u+rwX -- "$@"; rm -rf -- "$@"; }'
REMOVED_AT_ONCE = 1000  # paths; the kernel limits the arguments of a program to 2 MiB, by default


class SharedFolders:
    """The working folder, the home and the folder for temporary files, as they were when the sandbox started.

    Files of the working folder are shared on purpose. Those that an execution leaves in `temporary` folders are not.
    """

    def __init__(self, folder: str, temporary: Iterable[str]) -> None:
        self._folder = folder
        self._temporary = tuple(temporary)
        self._kept: dict[str, set[str]] = {}  # what was in those before an execution
        self._starts: tuple[str, ...] = ()  # how the names of files begin that processes may have left
        self._is_idle = False
        paths = dict.fromkeys((folder, os.environ.get("TMPDIR", "/tmp"), os.environ.get("HOME", folder)))
        self._states = {path: state for path in paths if (state := self._read_state(path)) is not None}

    def note_contents(self) -> None:
        """Takes what is in the temporary folders now for what is to stay there."""
        self._kept = {path: set(_list_names(path)) for path in self._temporary}

    def note_end(self, process_id: int, *, is_killed: bool) -> None:
        """Note a process that may not have removed the files of its code (`child/main_module.py`), if this is one."""
        if is_killed or self._list_changed():
            start = f"{CODE_FILE_PREFIX}{process_id}"
            self._starts += f"{start}.", f"{start}-"

    def is_damaged(self, *, is_idle: bool) -> bool:
        """Whether there is something to undo. In a sandbox that `is_idle` nothing that runs needs temporary files."""
        self._is_idle = is_idle
        if self._list_changed() or self._list_left():
            return True
        self._starts = ()
        return False

    def repair(self) -> None:
        """Undoes it, as the code's own user: for a process of its own, which ends with this."""
        for path in self._list_changed():
            try:
                if path != self._folder and not os.path.lexists(path):
                    os.mkdir(path)
                os.chmod(path, self._states[path][0] & 0o7777)
            except OSError:
                pass  # who has asked for this looks again
        left = [path for path in self._list_left() if not _remove_file(path)]
        for start in range(0, len(left), REMOVED_AT_ONCE):
            paths = left[start : start + REMOVED_AT_ONCE]
            os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", REMOVER, "rm", *paths], os.environ), 0)

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
        all_kept = self._kept if self._is_idle else {}
        left = [f"{path}/{name}" for path, kept in all_kept.items() for name in _list_names(path) if name not in kept]
        if self._starts:
            left += [f"{self._folder}/{name}" for name in _list_names(self._folder) if name.startswith(self._starts)]
        return left

    def _read_state(self, path: str) -> tuple[Any, ...] | None:
        """The folder's mode and owner, and of the working folder which one it is; None where there is none."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        state = status.st_mode, status.st_uid, status.st_gid
        return (*state, status.st_dev, status.st_ino) if path == self._folder else state


def _remove_file(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
