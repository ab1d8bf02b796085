"""The handle on one open sandbox of Modal."""

import asyncio
import logging
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import modal
from modal.types import FileType

from ...sandbox.driver_bundle import DriverChoice
from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import SandboxLost, VolumeError
from ...sandbox.sandbox_api import Sandbox, describe_large_file, describe_special_file
from ..host_files.files import HostFiles
from ..provider import build_kept_labels
from ..storage.safe_paths import split_path
from .channel import ModalChannel
from .deletion import try_to_terminate
from .errors import get_last_line, map_error, retry_refused
from .settings import ModalSettings

RELOAD_SECONDS = 60
FILE_SECONDS = 300.0

# A program for `python -c`. It reads the driver from standard input, before the first frame, and becomes the driver. It
# ends itself if no driver arrives, because waiting would keep its sandbox from being idle.
BOOT = """
import sys

sys.path[:] = [path for path in sys.path if path]  # before a module of the working directory is imported
import os, signal

signal.alarm(120)

data, rest = b"", {size}
while rest > len(data):
    piece = os.read(0, rest - len(data))
    data += piece or os._exit(0)
signal.alarm(0)
os.makedirs({workdir!r}, exist_ok=True)
{loader}
found["main"]()
"""

log = logging.getLogger("rlm_batch.modal")


class ModalSandboxHandle(Sandbox):
    """A sandbox of Modal."""

    provider = "modal"
    isolation = "modal"
    layers = ()
    memory_option = kill_memory_option = "memory_mib"

    def __init__(self, sandbox: modal.Sandbox, settings: ModalSettings, files: HostFiles) -> None:
        self.id = sandbox.object_id
        self.has_network = not settings.block_network
        modules, python = files.list_uploaded_directories(), files.find_uploaded_python()
        self.settings = replace(make_driver_settings(settings), python_path=modules, executable=python)
        self._provider_settings = settings
        self._driver = DriverChoice((settings.image, settings.setup))
        self._sandbox = sandbox
        self._channel: ModalChannel | None = None
        self._is_removed = self._has_run_code = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> ModalChannel:
        lifetime, driver = self._provider_settings.lifetime, self._driver.packed
        program = BOOT.format(size=len(driver.data), workdir=self.settings.cwd, loader=driver.loader)
        try:
            process: Any = await retry_refused(
                lambda: self._sandbox.exec.aio("python", "-u", "-c", program, text=False, timeout=lifetime)
            )
        except modal.exception.Error as error:
            raise map_error(error, f"the driver did not start in sandbox {self.id}") from error
        self._channel = ModalChannel(process, driver.data, receive, closed, sandbox_id=self.id, lifetime=lifetime)
        return self._channel

    def note_python(self, version: str) -> None:
        self._driver.confirm(version)

    def may_run_unheard(self) -> bool:
        return self._channel is not None and not self._channel.is_complete

    async def refresh_volume(self) -> None:
        """Reload the volume; see `Sandbox.refresh_volume`. Modal refuses to reload while code has a file of it open."""
        has_ended = self._is_removed or (self._channel is not None and self._channel.end_reason)
        if self.settings.volume is None or has_ended:
            return
        try:
            await retry_refused(lambda: self._sandbox.reload_volumes.aio(timeout=RELOAD_SECONDS))
        except modal.exception.ConflictError as error:
            log.warning(
                "sandbox %s could not reload its volume (%s), so code sees its earlier state",
                self.id,
                get_last_line(error),
            )
        except modal.exception.Error as error:
            raise SandboxLost(
                f"sandbox {self.id} did not reload its volume before the code was sent: {get_last_line(error)}"
            ) from error

    def expect_execution(self) -> None:
        self._has_run_code = True

    async def upload(self, path: str, data: bytes) -> None:
        remote_path = self._resolve_path(path)
        with self._map_file_errors(f"{path} could not be written"):
            if self._has_run_code:
                with suppress(modal.exception.SandboxFilesystemNotFoundError):
                    await self._check_file(path, remote_path, "written")
            await retry_refused(lambda: self._sandbox.filesystem.write_bytes.aio(data, remote_path))

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        files, remote_path = self._sandbox.filesystem, self._resolve_path(path)
        with self._map_file_errors(f"{path} could not be read"):
            if max_bytes is not None:
                size = await self._check_file(path, remote_path, "read")
                if size > max_bytes:
                    raise VolumeError(describe_large_file(path, size, max_bytes))
            # Code may replace the file by a pipe, which never ends.
            async with asyncio.timeout(None if max_bytes is None else FILE_SECONDS):
                return await retry_refused(lambda: files.read_bytes.aio(remote_path))

    async def _check_file(self, path: str, remote_path: str, action: str) -> int:
        """Return a file's size. Raise VolumeError if it is not a regular file: a pipe would never end."""
        info = await retry_refused(lambda: self._sandbox.filesystem.stat.aio(remote_path))
        if info.type is not FileType.FILE or (stat.S_IFMT(info.mode) and not stat.S_ISREG(info.mode)):
            raise VolumeError(describe_special_file(path, action, is_link=info.type is FileType.SYMLINK))
        return info.size

    @contextmanager
    def _map_file_errors(self, failure: str) -> Iterator[None]:
        try:
            yield
        except modal.exception.SandboxFilesystemError as error:
            raise VolumeError(f"{failure}: {get_last_line(error)}") from error
        except TimeoutError:
            raise SandboxLost(f"{failure} within {FILE_SECONDS:g} s: run the code in a new sandbox") from None
        except modal.exception.Error as error:
            raise SandboxLost(f"{failure}: sandbox {self.id} was lost: {get_last_line(error)}") from error

    def _resolve_path(self, path: str) -> str:
        if path.startswith("/"):
            return path
        return str(PurePosixPath(self.settings.cwd, *split_path(path)))

    async def keep(self, until: float, execution: int | None = None) -> None:
        """Tag the sandbox as kept, and leave it with a `sleep` in it, without which Modal would end it as idle."""
        try:
            tags = await retry_refused(self._sandbox.get_tags.aio)
            await retry_refused(lambda: self._sandbox.set_tags.aio({**tags, **build_kept_labels(until, execution)}))
            seconds = max(1, int(until - time.time()))
            await retry_refused(lambda: self._sandbox.exec.aio("sleep", str(seconds), timeout=seconds))
        except modal.exception.Error as error:
            raise map_error(error, "it could not be kept") from error
        self._is_removed = True
        if self._channel is not None:
            self._channel.close()
        with suppress(Exception):
            await self._sandbox.detach.aio()  # Without `detach` its socket stays open for half a minute.

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        self._driver.end()
        if self._channel is not None:
            self._channel.close()
        await try_to_terminate(self._sandbox, wait=self._provider_settings.has_sandbox_limit)


def make_driver_settings(settings: ModalSettings) -> DriverSettings:
    """Build the settings of the driver."""
    limits = {"CORE": 0} if settings.memory_mib is None else {"CORE": 0, "AS": settings.memory_mib * 1024 * 1024}
    volume = None if settings.volume_name is None else settings.volume_mount_path
    return DriverSettings(
        cwd=settings.workdir,
        volume=volume,
        environment={name: value.get_secret_value() for name, value in settings.environment.items()},
        lifetime=settings.lifetime,
        confinement={"limits": limits},
        commit=[] if volume is None else ["sync", volume],
    )
