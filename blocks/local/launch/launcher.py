"""Starts the driver of a local sandbox: forked from a zygote, or as a program of its own where that cannot be."""

import asyncio
import atexit
import logging
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ....sandbox.driver_bundle import build_driver_code
from .. import isolation
from ..inventory import compute_mark
from .bubblewrap import FOLDERS_MOUNT, Mount, build_bubblewrap_command, build_zygote_command, list_covered_mounts
from .driver_process import DriverProcess, SpawnedProcess, build_boot_program, build_python_command, find_python
from .zygote import Zygote, ZygoteError

log = logging.getLogger("rlm_batch.local")

MAX_IDLE_ZYGOTES = 4  # of other walls than the one that is asked for: each has 13 MB

Key = tuple[object, ...]


@dataclass(frozen=True)
class Launch:
    """What a sandbox's driver is started with. `mounts` and `shm_bytes` are bubblewrap's."""

    folder: Path
    is_bubblewrap: bool
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int = 0

    async def start(self) -> DriverProcess:
        """The driver's process, which waits for its first frame. Raises SandboxStartError."""
        try:
            return await zygotes.fork(self)
        except ZygoteError as error:
            log.debug("the sandbox %s starts a Python of its own: %s", self.folder.name, error)
        return self.spawn()

    def spawn(self) -> DriverProcess:
        """The same, as a program of its own."""
        program = build_boot_program("a local sandbox", len(build_driver_code()), f"watched={not self.is_bubblewrap}")
        command = build_python_command(program)
        if self.is_bubblewrap:
            command = [*build_bubblewrap_command(self.folder, self.mounts, self.shm_bytes), *command]
        return SpawnedProcess(command, "/" if self.is_bubblewrap else str(self.folder / "work"))

    def build_zygote_command(self) -> list[str]:
        """The words that go before the program of the zygote that it can be forked from."""
        return build_zygote_command(self.folder.parent, self.mounts) if self.is_bubblewrap else []

    @cached_property
    def key(self) -> Key:
        """What tells this set of walls from others."""
        sources = (self.folder.parent, *(mount.source for mount in self.mounts))
        return os.geteuid(), find_python(), *self.build_zygote_command(), *(_identify(path) for path in sources)

    def build_request(self) -> dict[str, Any]:
        """What a zygote is asked."""
        return {
            "folder": self.folder.name,
            "mark": compute_mark(self.folder),
            "cwd": "/" if self.is_bubblewrap else str(self.folder / "work"),
            "covered": list_covered_mounts(self.mounts),
            "shm_bytes": self.shm_bytes,
        }


class Zygotes:
    """The zygotes of this process, one for each set of walls, and why there is none where there cannot be one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygotes: dict[Key, Zygote] = {}
        self._reasons: dict[Key, str] = {}

    def find_obstacle(self, launch: Launch) -> str:
        """Why this sandbox cannot have a zygote, as far as has been tried; empty where it can."""
        if launch.is_bubblewrap and os.geteuid() and not isolation.find_landlock_abi():
            # A process that only forks keeps the user namespace of its parent's program, whose root is the code's user.
            return "without Landlock the code could change its supervisor's entries in /proc"
        return self._reasons.get(launch.key, "")

    async def fork(self, launch: Launch) -> DriverProcess:
        """A driver from the zygote of these walls, which is started where there is none. Raises ZygoteError."""
        if obstacle := self.find_obstacle(launch):
            raise ZygoteError(obstacle)
        for is_last in (False, True):
            zygote = self._zygotes.get(launch.key)
            if zygote is None or not zygote.is_alive:
                zygote = await asyncio.to_thread(self._start, launch)
            try:
                return await zygote.fork(launch.build_request())
            except ZygoteError as error:
                if error.is_lasting:
                    self._reasons[launch.key] = str(error)
                if zygote.is_alive or is_last:
                    raise
        raise AssertionError

    def _start(self, launch: Launch) -> Zygote:
        key = launch.key
        with self._lock:
            zygote = self._zygotes.get(key)
            if zygote is not None and zygote.is_alive:
                return zygote  # of another thread
            try:
                folders = FOLDERS_MOUNT if launch.is_bubblewrap else None
                zygote = self._zygotes[key] = Zygote(launch.build_zygote_command(), folders)
            except ZygoteError as error:
                if error.is_lasting:
                    self._reasons[key] = str(error)
                raise
            self._end_idle(key)
            return zygote

    def _end_idle(self, key: Key) -> None:
        idle = [other for other, zygote in self._zygotes.items() if other != key and not zygote.processes]
        idle.sort(key=lambda other: self._zygotes[other].used_at, reverse=True)
        # Who has become another user has no use for the old one's, and no right to them.
        for other in [other for at, other in enumerate(idle) if at >= MAX_IDLE_ZYGOTES or other[0] != key[0]]:
            self._zygotes.pop(other).end()

    def end(self) -> None:
        """Ends all of them."""
        with self._lock:
            while self._zygotes:
                self._zygotes.popitem()[1].end()

    def forget(self) -> None:
        """Leaves all of them to the process that this one was forked from."""
        self._lock = threading.Lock()
        while self._zygotes:
            self._zygotes.popitem()[1].forget()


def _identify(path: str | Path) -> tuple[int, int] | None:
    """A directory that was removed and made again is another one, and a zygote has the old one mounted."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


zygotes = Zygotes()
atexit.register(zygotes.end)
os.register_at_fork(after_in_child=zygotes.forget)
