"""The launcher: forks a local sandbox's driver from a zygote, or spawns it as a separate program if that fails."""

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ....sandbox.driver_bundle import build_driver_code
from ....sandbox.errors import SandboxStartError
from ....sandbox.wire.python_directory import write_python_directory
from .. import isolation
from ..inventory import compute_mark
from .bubblewrap import FOLDERS_MOUNT, Mount, build_bubblewrap_command, build_zygote_command, list_covered_mounts
from .driver_process import (
    DriverProcess,
    SpawnedProcess,
    build_boot_program,
    build_python_command,
    find_python,
    is_shortage,
)
from .zygote import Zygote, ZygoteError

log = logging.getLogger("rlm_batch.local")

MAX_IDLE_ZYGOTES = 4  # idle zygotes to keep besides the requested one; each takes 13 MB

Key = tuple[object, ...]


@dataclass(frozen=True)
class Launch:
    """The parameters for starting a sandbox's driver. Only bubblewrap uses those after `is_bubblewrap`."""

    folder: Path
    is_bubblewrap: bool
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int = 0  # limit of /dev/shm
    python_directory: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of `write_python_directory`
    disk_bytes: int = 0  # size of a file system in memory for the folder, which the host does not see; 0: on disk

    async def start(self) -> DriverProcess:
        """Fork or spawn the driver's process, which waits for its first frame. Raises SandboxStartError."""
        try:
            return await zygotes.fork(self)
        except ZygoteError as error:
            if self.disk_bytes:
                raise SandboxStartError(f"`disk_mib` needs a sandbox that is forked from a zygote: {error}") from error
            log.debug("the sandbox %s starts a Python of its own: %s", self.folder.name, error)
        return self.spawn()

    def spawn(self) -> DriverProcess:
        """Start the driver as a separate program, without a zygote. Raises SandboxStartError."""
        program = build_boot_program(
            "a local sandbox", len(build_driver_code()), arguments=f"watched={not self.is_bubblewrap}"
        )
        return SpawnedProcess(self.build_command(program), self.directory)

    def build_command(self, program: str) -> list[str]:
        """Return the command that runs a Python program in the sandbox."""
        command = build_python_command(program)
        if self.is_bubblewrap:
            write_python_directory(str(self.folder / "python"), **self.python_directory)
            command = [*build_bubblewrap_command(self.folder, self.mounts, self.shm_bytes), *command]
        return command

    @property
    def directory(self) -> str:
        """Return the directory in which the driver's command starts."""
        return "/" if self.is_bubblewrap else str(self.folder / "work")

    @cached_property
    def key(self) -> Key:
        """Return the key of the zygotes that can fork this driver. `python_directory` follows from the mounts."""
        identities: list[tuple[int, int] | None] = []  # A recreated directory gets another inode.
        for path in (self.folder.parent, *(mount.source for mount in self.mounts)):
            try:
                status = os.stat(path)
                identities.append((status.st_dev, status.st_ino))
            except OSError:
                identities.append(None)
        path = os.environ.get("PATH")  # It decides which bubblewrap is started.
        return os.geteuid(), find_python(), path, self.is_bubblewrap, self.mounts, *identities

    def build_request(self) -> dict[str, Any]:
        return {
            "folder": self.folder.name,
            "mark": compute_mark(self.folder),
            "cwd": self.directory,
            "covered": list_covered_mounts(self.mounts),
            "shm_bytes": self.shm_bytes,
            "disk_bytes": self.disk_bytes,
        }


class Zygotes:
    """The zygotes of this process by key, and the reasons for keys that cannot have one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygotes: dict[Key, Zygote] = {}
        self._reasons: dict[Key, str] = {}

    def find_obstacle(self, launch: Launch) -> str:
        """Return why this sandbox cannot use a zygote; empty if it can, or if no earlier sandbox tried."""
        if launch.is_bubblewrap and os.geteuid() and not isolation.find_landlock_abi():
            # A forked driver starts no program, so the kernel assigns it to the user namespace in which the zygote's
            # program started. The root of that namespace is the user that runs the code.
            return "without Landlock the code could change its supervisor's entries in /proc"
        return self._reasons.get(launch.key, "")

    async def fork(self, launch: Launch) -> DriverProcess:
        """Fork a driver from the zygote with this launch's key, and start that zygote if needed.

        A zygote that could not start, or whose first fork failed, is tried once more, because it may have been killed,
        and then never again, except after a shortage of descriptors, memory or processes. Raises ZygoteError,
        SandboxStartError.
        """
        obstacle = self.find_obstacle(launch)
        if obstacle:
            raise ZygoteError(obstacle)
        is_second_try = False
        while True:
            zygote = self._zygotes.get(launch.key)
            try:
                if zygote is None or not zygote.is_alive:
                    zygote = await asyncio.to_thread(self._start, launch)
                return await zygote.fork(launch.build_request())
            except ZygoteError as error:
                has_worked = zygote is not None and zygote.has_forked
                if has_worked or is_shortage(error):
                    raise
                if is_second_try:
                    self._reasons[launch.key] = str(error)
                    raise
                is_second_try = True

    def _start(self, launch: Launch) -> Zygote:
        key = launch.key
        with self._lock:
            zygote = self._zygotes.get(key)
            if zygote is None or not zygote.is_alive:  # Another thread may have started it.
                command: list[str] = []
                folders = None
                if launch.is_bubblewrap:
                    command = build_zygote_command(launch.folder.parent, launch.mounts)
                    folders = FOLDERS_MOUNT
                zygote = Zygote(command, folders, launch.python_directory)
                self._zygotes[key] = zygote
                self._end_idle(key)
            return zygote

    def _end_idle(self, newest: Key) -> None:
        """End idle zygotes: those of another user, and all but the last used `MAX_IDLE_ZYGOTES`."""
        idle = [key for key, zygote in self._zygotes.items() if key != newest and not zygote.processes]
        idle.sort(key=lambda key: self._zygotes[key].used_at)
        old = idle[:-MAX_IDLE_ZYGOTES]
        for key in idle:
            # After a change of user, this process cannot use the old user's zygotes and must not keep them.
            has_other_user = key[0] != newest[0]
            if key in old or has_other_user:
                self._zygotes.pop(key).end()

    def end(self) -> None:
        with self._lock:
            while self._zygotes:
                self._zygotes.popitem()[1].end()

    def forget(self) -> None:
        """Release all zygotes in a forked process; the parent process keeps them."""
        self._lock = threading.Lock()
        while self._zygotes:
            self._zygotes.popitem()[1].forget()


zygotes = Zygotes()
atexit.register(zygotes.end)
os.register_at_fork(after_in_child=zygotes.forget)
