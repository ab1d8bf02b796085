"""The handle on one open sandbox of Daytona."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import daytona

from ...sandbox.driver_bundle import DriverChoice
from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import RlmBatchError, SandboxLost, VolumeError
from ...sandbox.sandbox_api import Sandbox, describe_large_file, describe_special_file
from ..host_files.files import HostFiles
from ..provider import build_kept_labels
from .channel import INPUT_LIMIT_BYTES, DaytonaChannel
from .client import SharedClient, get_account_key
from .deletion import delete_sandbox, warn_of_leftover
from .errors import (
    CALL_SECONDS,
    SETUP_SECONDS,
    get_message,
    is_transient,
    is_turned_away,
    map_error,
    retry_call,
    says_gone,
)
from .launch import name_folder, start_driver
from .settings import DaytonaSettings
from .setup import clone_repository, install_packages, name_clone, run_setup, unpack_files

IDLE_MINUTES = 5  # minutes without a call before Daytona ends a sandbox, such as that of a dead host
KEEP_AWAKE_SECONDS = IDLE_MINUTES * 60 / 3  # seconds between calls that keep a used sandbox awake

log = logging.getLogger("rlm_batch.daytona")


class DaytonaSandboxHandle(Sandbox):
    """A sandbox of Daytona."""

    provider = "daytona"
    isolation = "daytona"
    layers = ()

    def __init__(
        self, settings: DaytonaSettings, client: SharedClient, remote: daytona.AsyncSandbox, files: HostFiles
    ) -> None:
        self.id = remote.id
        self.has_network = not settings.network_block_all
        if settings.image is not None:  # A snapshot's memory is fixed.
            self.memory_option = self.kill_memory_option = "memory"
        self.settings = DriverSettings(
            cwd=".",  # the directory where the driver's command starts
            volume=settings.volume_mount_path if settings.volume_name is not None else None,
            environment={name: value.get_secret_value() for name, value in settings.environment.items()},
            python_path=files.list_uploaded_directories(),
            executable=files.find_uploaded_python(),
            lifetime=settings.lifetime,
            files=name_folder(remote.id),
        )
        self._provider_settings = settings
        self._driver = DriverChoice((get_account_key(settings), settings.snapshot, settings.image, settings.setup))
        self._archive = files.archive
        self._client = client
        self._remote = remote
        self._directory = ""  # the clone, relative to the sandbox's working directory
        self._channel: DaytonaChannel | None = None
        self._keeping_awake: asyncio.Task[None] | None = None
        self._is_removed = self._has_run_code = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> DaytonaChannel:
        """Create a channel whose first frames start the driver; see `Sandbox.connect`."""
        self._channel = DaytonaChannel(self._remote, self._launch, receive, closed)
        return self._channel

    async def set_up(self, commit: str | None) -> None:
        """Run `setup`, clone the repository and install the packages. Raise the errors of `setup`."""
        settings = self._provider_settings
        if settings.setup is not None:
            await run_setup(self._remote, settings.setup, settings.start_timeout)
        if commit is not None:
            # A clone whose answer was lost may be running, so only a refused clone is retried here.
            await retry_call(
                lambda: clone_repository(self._remote, settings, commit),
                seconds=settings.start_timeout, remote=self._remote, is_passing=is_turned_away,
            )  # fmt: skip
        if settings.packages:
            await install_packages(self._remote, settings.packages, settings.start_timeout)

    async def add_files(self, commit: str | None) -> None:
        """Choose the directory of the code, the clone if there is one, and unpack the host's files."""
        if commit is not None:
            self._directory = name_clone(self._provider_settings)
        if self._archive is not None:
            await unpack_files(self._remote, self._archive, self._provider_settings.start_timeout)

    async def ensure_end(self) -> None:
        """Make sure that an idle sandbox ends, even if an old Daytona ignored the lifetime in the creation request.

        The driver itself ends at the end of the lifetime. The sandbox is then idle, so Daytona stops it, and deletes it
        because it is stopped.
        """
        remote = self._remote
        if remote.auto_destroy_at is not None:
            return
        try:
            if not 0 < (remote.auto_stop_interval or 0) <= IDLE_MINUTES:
                await retry_call(lambda: remote.set_autostop_interval(IDLE_MINUTES, CALL_SECONDS))
            if remote.auto_delete_interval != 0:
                await retry_call(lambda: remote.set_auto_delete_interval(0, CALL_SECONDS))
        except daytona.DaytonaError as error:
            log.warning(
                "this Daytona sets no lifetime for sandbox %s (%s): if this process dies, run `rlm-batch "
                "reap --provider daytona`",
                *(self.id, get_message(error)),
            )

    async def _launch(self, frames: list[bytes]) -> tuple[str, str]:
        """Start the driver; return its session and command. Raise SandboxStartError or StartLostError.

        Put the first small frames into the command, which saves a call, and remove them from the list. If there are
        environment variables, send all frames later: the variables may be secrets, which no command may contain.
        """
        first = b""
        while frames and not self.settings.environment and len(first) + len(frames[0]) <= INPUT_LIMIT_BYTES:
            first += frames.pop(0)
        seconds = self._provider_settings.start_timeout
        command = await start_driver(self._remote, self._driver.packed, self._directory, first, seconds)
        self._keeping_awake = asyncio.create_task(self._keep_awake())
        return command

    async def _keep_awake(self) -> None:
        """Tell Daytona regularly that the sandbox is in use, because code may wait longer than the idle limit."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._provider_settings.lifetime
        while loop.time() + KEEP_AWAKE_SECONDS < end:
            await asyncio.sleep(KEEP_AWAKE_SECONDS)
            try:
                await retry_call(lambda: self._remote.refresh_activity(CALL_SECONDS))
            except daytona.DaytonaError as error:
                log.debug("sandbox %s could not be kept awake: %s", self.id, get_message(error))

    def note_python(self, version: str) -> None:
        self._driver.confirm(version)

    def read_stderr_tail(self) -> str:
        return self._channel.stderr_tail if self._channel is not None else ""

    def may_run_unheard(self) -> bool:
        return self._channel is not None and not self._channel.is_complete

    def expect_execution(self) -> None:
        self._has_run_code = True

    async def upload(self, path: str, data: bytes) -> None:
        remote_path = self._resolve_path(path)
        try:
            if self._has_run_code:
                with suppress(daytona.DaytonaNotFoundError):
                    await retry_call(lambda: self._check_file(path, remote_path, "written"), remote=self._remote)
            await retry_call(
                lambda: self._remote.fs.upload_file(data, remote_path, int(SETUP_SECONDS)), remote=self._remote
            )
        except daytona.DaytonaError as error:
            raise self._map_file_error(error, path, "written") from error

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        remote_path = self._resolve_path(path)
        try:
            if max_bytes is not None:
                return await retry_call(lambda: self._read(path, remote_path, max_bytes), remote=self._remote)
            return (
                await retry_call(
                    lambda: self._remote.fs.download_file(remote_path, int(SETUP_SECONDS)), remote=self._remote
                )
                or b""
            )
        except daytona.DaytonaError as error:
            raise self._map_file_error(error, path, "read") from error

    async def _read(self, path: str, remote_path: str, max_bytes: int) -> bytes:
        """Read a file. Raise VolumeError if it is not a regular file or is larger than `max_bytes`."""
        data, size = bytearray(), await self._check_file(path, remote_path, "read")
        if size <= max_bytes:
            async for piece in await self._remote.fs.download_file_stream(remote_path, int(SETUP_SECONDS)):
                data += piece
                if (size := len(data)) > max_bytes:  # Code may append to the file during the download.
                    break
        if size > max_bytes:
            raise VolumeError(describe_large_file(path, size, max_bytes))
        return bytes(data)

    async def _check_file(self, path: str, remote_path: str, action: str) -> int:
        """Return a file's size. Raise VolumeError if it is not a regular file: a pipe would never end."""
        info = await self._remote.fs.get_file_info(remote_path, CALL_SECONDS)
        if not info.mode.startswith("-"):
            raise VolumeError(describe_special_file(path, action))
        return info.size

    def _resolve_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise VolumeError(f"{path!r} is not the path of a file")
        return path if path.startswith("/") or not self._directory else f"{self._directory}/{path}"

    def _map_file_error(self, error: Exception, path: str, action: str) -> RlmBatchError:
        message = get_message(error)
        if says_gone(error) or is_transient(error):
            return SandboxLost(f"{path} could not be {action}, for sandbox {self.id} does not answer: {message}")
        return VolumeError(f"{path} could not be {action}: {message}")

    async def keep(self, until: float, execution: int | None = None) -> None:
        """Label the sandbox as kept, and make Daytona destroy it then. An idle one may be destroyed a minute later."""
        minutes = max(1, math.ceil((until - time.time()) / 60))
        labels, remote = {**self._remote.labels, **build_kept_labels(until, execution)}, self._remote
        try:
            await retry_call(lambda: remote.set_labels(labels, CALL_SECONDS))
            await retry_call(lambda: remote.set_autostop_interval(minutes, CALL_SECONDS))
            with suppress(daytona.DaytonaNotFoundError):  # An old Daytona. An idle sandbox is stopped, and so deleted.
                await retry_call(lambda: remote.set_ttl(minutes, CALL_SECONDS))
        except daytona.DaytonaError as error:
            raise map_error(error, "it could not be kept") from error
        self._is_removed = True
        if self._keeping_awake is not None:
            self._keeping_awake.cancel()
        if self._channel is not None:
            await self._channel.close()
        self._client.release()

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        self._driver.end()
        try:
            if self._keeping_awake is not None:
                self._keeping_awake.cancel()
            if self._channel is not None:
                await self._channel.close()
            await delete_sandbox(self._remote, self._provider_settings.has_sandbox_limit)
        except daytona.DaytonaError as error:
            warn_of_leftover(self.id, error)
        finally:
            self._client.release()
