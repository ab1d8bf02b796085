"""The handle on one open local sandbox: its folder on the host, and the process of its driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import weakref
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ...sandbox.driver_bundle import build_driver_code
from ...sandbox.errors import SandboxLost, SandboxStartError, VolumeError
from ...sandbox.provider_api import DriverSettings, Sandbox
from ...sandbox.wire.pipes import widen_pipe
from ..storage.safe_paths import read_file_below, write_file_below
from ..subprocess_runner import run_command
from .channel import LocalChannel
from .inventory import END_GRACE_SECONDS, remove_empty_folder, remove_folder
from .isolation import INSTALL_HINT, IsolationLevel, list_layers
from .volume import LocalVolume

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 64 * 1024  # a larger buffer would be mapped anew for each read
PIPE_BYTES = 256 * 1024  # of the wire; a user has 64 MiB of it before the kernel makes all new pipes narrow


class LocalSandboxHandle(Sandbox):
    """One local sandbox: a folder, and the processes of its driver."""

    provider = "local"

    def __init__(
        self,
        folder: Path,
        level: IsolationLevel,
        settings: DriverSettings,
        command: list[str],
        cwd: str,
        volume: LocalVolume | None,
        lock: int,
    ) -> None:
        self.id = folder.name
        self.isolation = level
        self.layers = list_layers(level)
        self.settings = settings
        self._folder = folder
        self._command = command
        self._cwd = cwd
        self._volume = volume
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = b""
        self._lock = lock  # the locked file of the labels
        # A program that ends without shutting down leaves no folder either; the processes end with the wire.
        self._finalizer = weakref.finalize(self, _remove_unclosed, folder, lock)

    async def copy_repository(self, clone: Path) -> None:
        """Copies the clone to where the code runs. Raises SandboxStartError."""
        work = self._folder / "work"
        commands = [["cp", "-r", "--preserve=mode,timestamps,links", "--reflink=auto", "--", f"{clone}/.", str(work)]]
        if os.geteuid() == 0:
            owner = work.stat()
            commands.append(["chown", "-R", "-h", f"{owner.st_uid}:{owner.st_gid}", "--", str(work)])
        for command in commands:
            done = await run_command(*command)
            if done.returncode:
                raise SandboxStartError(f"the repository could not be copied into the sandbox: {done.stderr.strip()}")

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> LocalChannel:
        """Starts the driver; see `Sandbox.connect`."""
        reads, writes = self._launch()
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
            words = self.read_stderr_tail()
            closed(f"its process has ended: {words}" if words else "its process has ended")

        loop.add_reader(reads, on_output)
        channel = LocalChannel(writes)
        await self._send_driver(channel)
        return channel

    async def attach(self) -> tuple[int, int]:
        """Starts the driver; see `Sandbox.attach`."""
        reads, writes = self._launch()
        await self._send_driver(LocalChannel(writes))
        return reads, writes

    async def _send_driver(self, channel: LocalChannel) -> None:
        try:
            await channel.send(build_driver_code())
        except SandboxLost:
            words = self.read_stderr_tail() or "its process ended at once"
            raise SandboxStartError(f"the driver did not start in sandbox {self.id}: {words}") from None

    def _launch(self) -> tuple[int, int]:
        # On this thread and no other: a parent-death signal comes when the thread that started a process ends.
        try:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._cwd,
                env={},
                bufsize=0,
                start_new_session=True,  # Ctrl-C in the terminal is the host's to handle
            )
        except OSError as error:
            raise SandboxStartError(
                f"{self._command[0]} could not be started: {error.strerror}. {INSTALL_HINT}"
            ) from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        widen_pipe(process.stdin.fileno(), PIPE_BYTES)
        return process.stdout.fileno(), process.stdin.fileno()

    def read_stderr_tail(self) -> str:
        """The end of what came on the standard error of the driver, or of bubblewrap."""
        process = self._process
        if process is None or process.stderr is None:
            return ""
        with suppress(OSError, ValueError):
            self._stderr += os.read(process.stderr.fileno(), READ_BYTES)
        return self._stderr[-2000:].decode("utf-8", "replace").strip()

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file; see `Sandbox.upload`."""
        volume_file = self._find_on_volume(path)
        if volume_file is not None:
            await volume_file[0].put(volume_file[1], data)
        else:
            await asyncio.to_thread(write_file_below, *self._find_on_host(path), data)

    async def download(self, path: str) -> bytes:
        """A file's bytes; see `Sandbox.download`."""
        volume_file = self._find_on_volume(path)
        if volume_file is not None:
            return await volume_file[0].get(volume_file[1])
        return await asyncio.to_thread(read_file_below, *self._find_on_host(path))

    def _find_on_volume(self, path: str) -> tuple[LocalVolume, str] | None:
        """The volume and the path on it, None for a path of the code's that is not on it."""
        mount = self.settings.volume
        if self._volume is None or mount is None or not PurePosixPath(path).is_relative_to(mount):
            return None
        return self._volume, str(PurePosixPath(path).relative_to(mount))

    def _find_on_host(self, path: str) -> tuple[Path, str]:
        """Where the host has a path of the code's: a directory, and the path below it. Raises VolumeError."""
        settings = self.settings
        directories = {settings.cwd: self._folder / "work", settings.environment["TMPDIR"]: self._folder / "tmp"}
        for inside, outside in directories.items():
            if PurePosixPath(path).is_relative_to(inside):
                return outside, str(PurePosixPath(path).relative_to(inside))
        if path.startswith("/"):
            raise VolumeError(f"{path} is in no directory that the code may write: {', '.join(directories)}")
        return self._folder / "work", path

    async def remove(self) -> None:
        """Closes the wire, upon which the driver ends everything; ends the driver itself if it does not."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdout is not None:
                asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            for number in (signal.SIGTERM, signal.SIGKILL):
                if await _wait_for_end(process, END_GRACE_SECONDS):
                    break
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            else:
                await _wait_for_end(process, END_GRACE_SECONDS)
        if not remove_empty_folder(self._folder):
            await asyncio.to_thread(remove_folder, self._folder)
        if self._finalizer.detach() is not None:
            os.close(self._lock)


async def _wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends within that time; reaps it."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        for _ in range(int(seconds / 0.01)):
            await asyncio.sleep(0.01)
            if process.poll() is not None:
                return True
        return False
    loop.add_reader(handle, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await ended
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.poll() is not None


def _remove_unclosed(folder: Path, lock: int) -> None:
    remove_folder(folder)
    os.close(lock)
