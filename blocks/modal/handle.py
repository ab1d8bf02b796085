"""The handle on one open sandbox of Modal."""

import asyncio
import logging
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import modal
from modal.types import FileType

from ...sandbox.driver_bundle import pack_driver
from ...sandbox.errors import SandboxLost, VolumeError
from ..cloud_sandbox import CloudSandbox, FileStatus
from ..host_files.files import HostFiles
from .account import try_to_terminate
from .channel import ModalChannel
from .errors import convert_errors, get_last_line, retry_refused
from .settings import ModalSettings

RELOAD_SECONDS = 60
SETUP_SECONDS = 600  # seconds for a clone or for unpacking the host's files
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


class ModalSandboxHandle(CloudSandbox):
    """A sandbox of Modal."""

    provider = isolation = "modal"
    memory_option = kill_memory_option = "memory_mib"
    python = "python"

    def __init__(self, sandbox: modal.Sandbox, settings: ModalSettings, files: HostFiles) -> None:
        limits = {"CORE": 0}
        if settings.memory_mib is not None:
            limits["AS"] = settings.memory_mib * 1024 * 1024
        super().__init__(
            sandbox.object_id,
            settings,
            files,
            cwd=settings.workdir,
            confinement={"limits": limits},
            commit=[] if settings.volume_name is None else ["sync", settings.volume_mount_path],
        )
        self.has_network = not settings.block_network
        self.directory = settings.workdir
        self._sandbox = sandbox

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> ModalChannel:
        lifetime = self._provider_settings.lifetime
        driver = pack_driver()
        program = BOOT.format(size=len(driver.data), workdir=self.settings.cwd, loader=driver.loader)
        with convert_errors(f"the driver did not start in sandbox {self.id}"):
            process: Any = await retry_refused(
                lambda: self._sandbox.exec.aio("python", "-u", "-c", program, text=False, timeout=lifetime)
            )
        self._channel = ModalChannel(process, driver.data, receive, closed, self.id)
        return self._channel

    async def refresh_volume(self) -> None:
        """Reload the volume; see `Sandbox.refresh_volume`. Modal refuses to reload while code has a file of it open."""
        if self.settings.volume is None or self._is_removed:
            return
        if self._channel is not None and self._channel.end_reason:
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

    async def run_command(self, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        process: Any = await retry_refused(
            lambda: self._sandbox.exec.aio(*words, text=False, env=dict(environment or {}), timeout=SETUP_SECONDS)
        )
        status = await retry_refused(process.wait.aio)
        if status == 0:
            return 0, ""
        stderr = await process.stderr.read.aio()
        return status, stderr.decode("utf-8", "replace")

    async def stat_file(self, place: str) -> FileStatus | None:
        try:
            info = await retry_refused(lambda: self._sandbox.filesystem.stat.aio(place))
        except modal.exception.SandboxFilesystemNotFoundError:
            return None
        # Modal's type of a pipe or device is FILE, too. Only the mode tells them apart, if it has the file's type.
        is_special = stat.S_IFMT(info.mode) != 0 and not stat.S_ISREG(info.mode)
        is_file = info.type is FileType.FILE and not is_special
        return FileStatus(is_file, info.size, info.type is FileType.SYMLINK)

    async def write_file(self, place: str, data: bytes) -> None:
        await retry_refused(lambda: self._sandbox.filesystem.write_bytes.aio(data, place))

    async def read_file(self, place: str, max_bytes: int | None) -> bytes:
        # Code may replace the file by a pipe, which never ends.
        async with asyncio.timeout(None if max_bytes is None else FILE_SECONDS):
            return await retry_refused(lambda: self._sandbox.filesystem.read_bytes.aio(place))

    @contextmanager
    def map_file_errors(self, failure: str) -> Iterator[None]:
        try:
            yield
        except modal.exception.SandboxFilesystemError as error:
            raise VolumeError(f"{failure}: {get_last_line(error)}") from error
        except (modal.exception.Error, TimeoutError) as error:
            raise SandboxLost(f"{failure}: sandbox {self.id} was lost: {get_last_line(error)}") from error

    async def label_as_kept(self, until: float, labels: dict[str, str]) -> None:
        """See `CloudSandbox.label_as_kept`. A `sleep` keeps Modal from ending the sandbox as idle."""
        seconds = max(1, int(until - time.time()))
        with convert_errors("it could not be kept"):
            tags = await retry_refused(self._sandbox.get_tags.aio)
            await retry_refused(lambda: self._sandbox.set_tags.aio({**tags, **labels}))
            await retry_refused(lambda: self._sandbox.exec.aio("sleep", str(seconds), timeout=seconds))

    async def delete(self) -> None:
        await try_to_terminate(self._sandbox, wait=self._provider_settings.has_sandbox_limit)

    async def release(self) -> None:
        with suppress(Exception):
            await self._sandbox.detach.aio()  # Without `detach` its socket stays open for half a minute.
