"""The handle on one open local sandbox: its folder on the host, and the process of its driver."""

import asyncio
import logging
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import SandboxLost, SandboxStartError, VolumeError
from ...sandbox.sandbox_api import Sandbox
from ...sandbox.wire.pipes import READ_BYTES
from ...sandbox.wire.python_directory import remove_python_directory
from ..storage.local_volume import OWN_MODES, LocalVolume
from ..storage.safe_paths import read_file_below, replace_file_below
from ..subprocess_runner import run_command
from .cgroup import SandboxGroup, remove_group, try_remove_group
from .channel import LocalChannel
from .deletion import END_GRACE_SECONDS, kill_processes, remove_empty_folder, remove_folder
from .inventory import leave_folder
from .isolation import IsolationLevel
from .launch.driver_process import DriverProcess
from .launch.launcher import Launch
from .watcher import WatchedSandbox, start_watcher

log = logging.getLogger("rlm_batch.local")


@dataclass(eq=False, repr=False)  # The settings contain secrets.
class LocalSandboxHandle(Sandbox):
    """One local sandbox: a folder, and the processes of its driver."""

    provider = "local"
    memory_option = "memory_mib"  # This is for a MemoryError. After a kill, `find_exceeded_limit` names the option.
    folder: Path
    level: IsolationLevel
    layers: tuple[str, ...]
    settings: DriverSettings
    launch: Launch
    volume: LocalVolume | None
    lock: int  # descriptor of the locked labels file
    group: SandboxGroup
    watched: WatchedSandbox | None

    def __post_init__(self) -> None:
        self.id = self.folder.name
        self.isolation = self.level
        self.has_network = self.level == "none"
        self._process: DriverProcess | None = None
        self._channel: LocalChannel | None = None
        self.clone: Path | None = None  # the repository to copy into the working directory at the start
        # The folders of the code as the host reaches them, by their paths in the sandbox.
        self._own_folders = {
            self.settings.cwd: self.folder / "work", self.settings.environment["TMPDIR"]: self.folder / "tmp"
        }  # fmt: skip
        self._descriptors = [self.lock]
        # This removes the folder if the program ends without a shutdown. The processes end when the wire closes.
        self._finalizer = weakref.finalize(
            self, _remove_unclosed, os.getpid(), self.folder, self._descriptors, self.group.path
        )

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> LocalChannel:
        reads, writes = await self.attach()
        loop = asyncio.get_running_loop()

        def on_output() -> None:
            try:
                data = os.read(reads, READ_BYTES)
            except BlockingIOError:
                return
            if data:
                receive(data)
                return
            loop.remove_reader(reads)
            errors = self.read_stderr_tail()
            closed(f"its process has ended: {errors}" if errors else "its process has ended")

        loop.add_reader(reads, on_output)
        self._channel = LocalChannel(writes, closed)
        return self._channel

    async def attach(self) -> tuple[int, int]:
        process = await self.launch.start()
        self._process = process
        try:
            if self.launch.disk_bytes:
                self._open_own_folders(await process.find_pid())
            if self.clone is not None:
                await self._copy_repository(self.clone)
            if self.group.limits or self.watched is not None:
                await self.hold_to_totals(await process.find_pid(), is_supervisor=process.is_supervisor)
            await LocalChannel(process.stdin.fileno()).send(process.boot)
        except SandboxLost:
            reason = self.read_stderr_tail() or "its process ended at once"
            raise SandboxStartError(f"the driver did not start in sandbox {self.id}: {reason}") from None
        return process.stdout.fileno(), process.stdin.fileno()

    async def _copy_repository(self, clone: Path) -> None:
        """Copy the clone into the code's working directory. Raises SandboxStartError."""
        work = self._own_folders[self.settings.cwd]
        owner = work.stat()
        copy = ["cp", "-r", "--preserve=mode,timestamps,links", "--reflink=auto", "--", f"{clone}/.", str(work)]
        change_owner = ["chown", "-R", "-h", f"{owner.st_uid}:{owner.st_gid}", "--", f"{work}/."]
        for command in (copy, change_owner):
            done = await run_command(*command)
            if done.returncode:
                raise SandboxStartError(f"the repository could not be copied into the sandbox: {done.stderr.strip()}")

    def _open_own_folders(self, pid: int) -> None:
        """Open the folders that only the sandbox's processes have mounted. `pid` is the id of such a process."""
        owner = (self.folder / "work").stat()
        for path in self._own_folders:
            descriptor = os.open(f"/proc/{pid}/root{path}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            folder = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            self._own_folders[path] = folder
            if os.geteuid() == 0:
                os.chown(folder, owner.st_uid, owner.st_gid)

    async def hold_to_totals(self, pid: int, *, is_supervisor: bool = False) -> None:
        """Put a new process under the limits on the whole sandbox, before any input. Raises SandboxStartError."""
        try:
            await asyncio.to_thread(self.group.add, pid)
        except ProcessLookupError:
            pass  # The process ended already, so the next send fails.
        except OSError as error:
            raise SandboxStartError(f"sandbox {self.id} could not be put into its control group: {error}") from error
        if self.watched is not None:
            self.watched.pid = pid
            self.watched.is_supervisor = is_supervisor
            start_watcher(os.getpid()).add(self.watched)

    def find_exceeded_limit(self) -> str:
        watched_limit = "" if self.watched is None else self.watched.take_exceeded_limit()
        return "total_memory_mib" if self.group.has_new_memory_kill() else watched_limit

    def read_stderr_tail(self) -> str:
        return "" if self._process is None else self._process.read_stderr_tail()

    async def upload(self, path: str, data: bytes) -> None:
        place, name = self._locate(path)
        if isinstance(place, LocalVolume):
            await place.put(name, data)
        else:
            await asyncio.to_thread(replace_file_below, place, name, data, *OWN_MODES)

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        place, name = self._locate(path)
        if isinstance(place, LocalVolume):
            return await place.get(name, max_bytes)
        return await asyncio.to_thread(read_file_below, place, name, max_bytes)

    def _locate(self, path: str) -> tuple[LocalVolume | Path, str]:
        """Return the volume or host directory of a path in the sandbox, and the path below it. Raises VolumeError."""
        folders: dict[str, LocalVolume | Path] = {**self._own_folders}
        if self.volume is not None and self.settings.volume is not None:
            folders = {self.settings.volume: self.volume, **folders}  # The volume may be below an own folder.
        absolute = PurePosixPath(self.settings.cwd, path)
        for inside, outside in folders.items():
            if absolute.is_relative_to(inside):
                return outside, str(absolute.relative_to(inside))
        raise VolumeError(f"{path!r} is outside the directories that code may write")

    async def keep(self, until: float, execution: int | None = None) -> None:
        """End the processes, but do not delete the folder before the time `until`."""
        if self.launch.disk_bytes:
            for source, name in zip(self._own_folders.values(), ("work", "tmp"), strict=True):
                await run_command("cp", "-a", "--", f"{source}/.", str(self.folder / name))
        if await self._end_processes(keeps_folder=True) and self._finalizer.detach():
            try_remove_group(self.group.path)
            try:
                await asyncio.to_thread(leave_folder, self.folder, until, execution)
            finally:
                _close_all(self._descriptors)

    async def remove(self) -> None:
        """End all processes and remove the folder."""
        if not await self._end_processes(keeps_folder=False):
            return
        if try_remove_group(self.group.path) and remove_empty_folder(self.folder):
            self._unlock()
        else:
            await asyncio.to_thread(self._finalizer)

    async def _end_processes(self, *, keeps_folder: bool) -> bool:
        """End the driver and all processes. Return False, and leave the folder to `reap`, if some survive."""
        process = self._process
        self._process = None
        if self.watched is not None:
            start_watcher(os.getpid()).discard(self.watched)
        if self._channel is not None:
            self._channel.close()
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            process.kill_namespace()
            process.close_pipes()  # Without a namespace, the driver then ends all processes itself.
        if not keeps_folder and not self.launch.is_bubblewrap:
            with suppress(OSError):  # This takes about as long as the end of the processes.
                remove_python_directory(str(self.folder / "python"))
        if process is None:
            return True
        if not await process.wait(END_GRACE_SECONDS):
            process.send_signal(signal.SIGTERM)
            await process.wait(END_GRACE_SECONDS)
        survivors = "" if process.has_ended_all else await kill_processes(self.folder)
        if survivors:
            log.warning("these processes of sandbox %s could not be ended, and reap will retry: %s", self.id, survivors)
            self._unlock()  # `reap` finds an unlocked folder.
        return not survivors

    def _unlock(self) -> None:
        """Release the lock, and leave the folder as it is."""
        if self._finalizer.detach():
            _close_all(self._descriptors)


def _remove_unclosed(owner: int, folder: Path, descriptors: list[int], group: str) -> None:
    if os.getpid() != owner:
        return  # This process is a fork. The sandbox is its parent's.
    remove_group(group)
    remove_folder(folder)
    _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
