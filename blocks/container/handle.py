"""The handle on one open container."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from ...sandbox.driver_settings import STAY_SIGNAL, DriverSettings
from ...sandbox.errors import RlmBatchError, SandboxLost, SandboxStartError, VolumeError
from ...sandbox.sandbox_api import Sandbox, describe_large_file, describe_special_file
from ..storage.local_volume import LocalVolume
from ..storage.safe_paths import split_path
from .channel import ContainerChannel
from .deletion import find_container, mark_as_kept, remove_container
from .engine import CLIENT_DIRECTORY, ENGINE_STATUSES, Engine, get_last_line
from .launch import Payload
from .settings import ContainerSettings

END_GRACE_SECONDS = 8.0  # seconds for the driver to end all processes and for the engine to remove the container
FILE_SECONDS = 300.0
# Exit statuses of the programs below
FILE_ERROR_STATUS = 3
NOT_A_FILE_STATUS = 4
LARGE_FILE_STATUS = 5
# The programs refuse devices and pipes, because they can be endless. Code may have created a link to a device.
WRITE_FILE = f"""
import os, stat, sys
path = sys.argv[1]
try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os._exit({NOT_A_FILE_STATUS})
        while data := sys.stdin.buffer.read(1 << 20):
            file.write(data)
except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    os._exit({FILE_ERROR_STATUS})
"""
READ_FILE = f"""
import os, stat, sys
try:
    limit = int(sys.argv[2] or 1 << 62)
    with open(os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            os._exit({NOT_A_FILE_STATUS})
        size = status.st_size
        read = 0  # bytes; code may append to the file meanwhile
        while size <= limit:
            data = file.read(1 << 20)
            if not data:
                break
            sys.stdout.buffer.write(data)
            read += len(data)
            size = max(size, read)
        if size > limit:
            print(size, file=sys.stderr, flush=True)
            os._exit({LARGE_FILE_STATUS})
    sys.stdout.flush()
except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    os._exit({FILE_ERROR_STATUS})
"""

# Options of the engine's clients
PIPES: dict[str, Any] = {
    "stdin": asyncio.subprocess.PIPE,
    "stdout": asyncio.subprocess.PIPE,
    "stderr": asyncio.subprocess.PIPE,
    "start_new_session": True,  # Ctrl-C in the terminal must not reach the client.
    "cwd": CLIENT_DIRECTORY,
}

log = logging.getLogger("rlm_batch.container")


class ContainerHandle(Sandbox):
    """A container, and the engine's client that connects to its driver."""

    provider = "container"
    memory_option = kill_memory_option = "memory_mib"

    def __init__(
        self,
        settings: ContainerSettings,
        engine: Engine,
        name: str,
        layers: tuple[str, ...],
        driver_settings: DriverSettings,
        command: list[str],
        payload: Payload,
        volume: LocalVolume | None,
    ) -> None:
        self.id = name
        self.has_network = settings.network
        self.isolation = engine.name
        self.layers = layers
        self.limits = {
            "memory_mib": settings.memory_mib,
            "processes": settings.processes,
            "disk_mib": settings.disk_limit_mib,
        }
        self.settings = driver_settings
        self._engine = engine
        self._command = command
        self._payload = payload
        self._volume = volume
        self._process: asyncio.subprocess.Process | None = None
        self._channel: ContainerChannel | None = None

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> ContainerChannel:
        try:
            process = self._process = await asyncio.create_subprocess_exec(*self._command, **PIPES)
        except OSError as error:
            raise SandboxStartError(f"the engine {self._engine.program} could not be started: {error}") from error
        channel = self._channel = ContainerChannel(process, receive, closed)
        try:
            for piece in self._payload.read_pieces():
                await channel.send(piece)
        except SandboxLost:
            raise SandboxStartError(f"the driver did not start in container {self.id}: {channel.end_reason}") from None
        return channel

    def read_stderr_tail(self) -> str:
        return "" if self._channel is None else self._channel.stderr_tail

    def may_run_unheard(self) -> bool:
        if self._process is None:
            return False
        # A killed client may lose output of the driver. A client that ended normally has passed on all of it.
        status = self._process.returncode
        return status is None or status < 0

    async def upload(self, path: str, data: bytes) -> None:
        place = self._locate(path)
        if self._volume is not None and isinstance(place, str):
            await self._volume.put(place, data)  # It replaces a file in one step, so that no reader sees half of it.
        else:
            await self._run_on_file(WRITE_FILE, str(place), path, "written", data)

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        place = self._locate(path)
        if self._volume is not None and isinstance(place, str):
            return await self._volume.get(place, max_bytes)
        return await self._run_on_file(READ_FILE, str(place), path, "read", max_bytes=max_bytes)

    def _locate(self, path: str) -> str | PurePosixPath:
        """Return the path relative to the volume, or else the path in the container. Raise VolumeError."""
        if not path or "\0" in path:
            raise VolumeError(f"{path!r} is not the path of a file")
        if self.settings.volume is not None and PurePosixPath(path).is_relative_to(self.settings.volume):
            return str(PurePosixPath(path).relative_to(self.settings.volume))
        return PurePosixPath(path) if path.startswith("/") else PurePosixPath(self.settings.cwd, *split_path(path))

    async def _run_on_file(
        self, program: str, place: str, path: str, action: str, data: bytes = b"", max_bytes: int | None = None
    ) -> bytes:
        """Run a program on a file in the container and return its output. Engines cannot copy to or from a tmpfs.

        Errors name the file by `path`. `action`, such as "read", is the part that says what could not be done.
        """
        limit = "" if max_bytes is None else str(max_bytes)
        failure = f"{path} could not be {action}"
        process = await asyncio.create_subprocess_exec(
            *(self._engine.program, "exec", "--interactive", self.id),
            *("python3", "-I", "-c", program, place, limit),
            **PIPES,
        )
        try:
            async with asyncio.timeout(FILE_SECONDS):
                stdout, stderr = await process.communicate(data)
        except TimeoutError:
            raise SandboxLost(f"{failure} within {FILE_SECONDS:g} s: run the code in a new sandbox") from None
        finally:
            await _kill(process)
        words = get_last_line(stderr.decode("utf-8", "replace"))
        if process.returncode == FILE_ERROR_STATUS:
            raise VolumeError(f"{failure}: {words}")
        if process.returncode == NOT_A_FILE_STATUS:
            raise VolumeError(describe_special_file(path, action))
        if process.returncode == LARGE_FILE_STATUS and max_bytes is not None:
            raise VolumeError(describe_large_file(path, int(words), max_bytes))
        if process.returncode:
            raise SandboxLost(f"{failure}: container {self.id} was lost: {words}")
        return stdout

    async def keep(self, until: float, execution: int | None = None) -> None:
        """Rename the container, tell the driver to stay, and kill the engine's client."""
        process = self._process
        if process is None:
            return
        await mark_as_kept(self._engine, self.id, until, execution)
        container = await find_container(self._engine, self.id) or self.id  # It has a new name.
        done = await self._engine.run("kill", "--signal", STAY_SIGNAL, container)
        if done.returncode:
            await remove_container(self._engine, container, self.id)
            raise RlmBatchError(f"its driver could not be told to stay: {get_last_line(done.stderr)}")
        self._process = None
        await self._disconnect(process)

    async def remove(self) -> None:
        """Close the connection, which makes the driver end all processes. Remove a container that does not end."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._channel is not None:
            self._channel.close()
        status: int | None = None
        with suppress(TimeoutError):
            status = await asyncio.wait_for(process.wait(), END_GRACE_SECONDS)
        # Podman may end with the status of a missing program when conmon was killed.
        is_removed = status is not None and status >= 0 and status not in ENGINE_STATUSES
        try:
            if not is_removed:
                await remove_container(self._engine, self.id, self.id)
        except RlmBatchError as error:
            log.warning("%s; it ends at its lifetime, and rlm-batch reap --provider container removes it", error)
        finally:
            await self._disconnect(process)

    async def _disconnect(self, process: asyncio.subprocess.Process) -> None:
        if self._channel is not None:
            self._channel.close()
        await _kill(process)
        if self._channel is not None:
            await self._channel.wait_closed()


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
