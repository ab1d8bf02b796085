"""One open sandbox of Modal: its driver, its files, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ...sandbox.errors import SandboxLost
from ...sandbox.provider_api import DriverSettings, Sandbox
from ..storage.safe_paths import split_path
from .calls import retry_refused
from .channel import ModalChannel
from .driver_boot import make_boot_program
from .errors import get_last_line, map_error, map_file_errors
from .settings import ModalSettings
from .termination import try_to_terminate

if TYPE_CHECKING:
    import modal

RELOAD_SECONDS = 60

log = logging.getLogger("rlm_batch.modal")


class ModalSandboxHandle(Sandbox):
    """One sandbox of Modal."""

    provider = "modal"
    isolation = "modal"
    layers = ()

    def __init__(self, sandbox: modal.Sandbox, settings: ModalSettings) -> None:
        self.id = sandbox.object_id
        self.settings = make_driver_settings(settings)
        self._sandbox = sandbox
        self._lifetime = settings.lifetime
        self._has_sandbox_limit = settings.has_sandbox_limit
        self._channel: ModalChannel | None = None
        self._is_removed = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> ModalChannel:
        """Starts the driver; see `Sandbox.connect`."""
        import modal

        program, first_input = make_boot_program(self.settings.cwd)
        try:
            process: Any = await retry_refused(
                lambda: self._sandbox.exec.aio("python", "-u", "-c", program, text=False, timeout=self._lifetime)
            )
        except modal.exception.Error as error:
            raise map_error(error, f"the driver did not start in sandbox {self.id}") from error
        self._channel = ModalChannel(process, first_input, receive, closed, sandbox_id=self.id, lifetime=self._lifetime)
        return self._channel

    async def refresh_volume(self) -> None:
        """Reloads the volume; see `Sandbox.refresh_volume`. It cannot be while code holds a file of it open."""
        import modal

        has_ended = self._is_removed or (self._channel is not None and self._channel.end_reason)
        if self.settings.volume is None or has_ended:
            return
        try:
            await retry_refused(lambda: self._sandbox.reload_volumes.aio(timeout=RELOAD_SECONDS))
        except modal.exception.ConflictError as error:
            log.warning(
                "sandbox %s could not reload its volume (%s): code sees it as it was", self.id, get_last_line(error)
            )
        except modal.exception.Error as error:
            raise SandboxLost(
                f"sandbox {self.id} did not reload its volume before the code was sent: {get_last_line(error)}"
            ) from error

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file; see `Sandbox.upload`."""
        with map_file_errors(self.id, f"{path} could not be written"):
            await retry_refused(lambda: self._sandbox.filesystem.write_bytes.aio(data, self._resolve_path(path)))

    async def download(self, path: str) -> bytes:
        """A file's bytes; see `Sandbox.download`."""
        with map_file_errors(self.id, f"{path} could not be read"):
            return await retry_refused(lambda: self._sandbox.filesystem.read_bytes.aio(self._resolve_path(path)))

    def _resolve_path(self, path: str) -> str:
        if path.startswith("/"):
            return path
        return str(PurePosixPath(self.settings.cwd, *split_path(path)))

    async def remove(self) -> None:
        """Terminates the sandbox, and closes the connection to it."""
        if self._is_removed:
            return
        self._is_removed = True
        if self._channel is not None:
            self._channel.close()
        await try_to_terminate(self._sandbox, wait=self._has_sandbox_limit)


def make_driver_settings(settings: ModalSettings) -> DriverSettings:
    """What the driver in a sandbox of these settings is told."""
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
