"""The handle on one open sandbox of Daytona."""

import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import daytona

from ...sandbox.errors import SandboxLost, VolumeError
from ..cloud_sandbox import CloudSandbox, FileStatus
from ..host_files.files import HostFiles
from .account import delete_sandbox, warn_of_leftover
from .channel import DaytonaChannel
from .errors import (
    CALL_SECONDS,
    SETUP_SECONDS,
    convert_errors,
    get_message,
    is_transient,
    is_turned_away,
    retry_call,
    says_gone,
)
from .launch import name_folder, start_driver
from .settings import DaytonaSettings
from .setup import install_packages, run_setup

log = logging.getLogger("rlm_batch.daytona")


class DaytonaSandboxHandle(CloudSandbox):
    """A sandbox of Daytona."""

    provider = isolation = "daytona"

    def __init__(
        self, settings: DaytonaSettings, remote: daytona.AsyncSandbox, files: HostFiles, directory: str
    ) -> None:
        # The driver's command starts in the directory of the code.
        super().__init__(remote.id, settings, files, cwd=".", files=name_folder(remote.id))
        self.has_network = not settings.network_block_all
        if settings.image is not None:  # A snapshot's memory is fixed.
            self.memory_option = self.kill_memory_option = "memory"
        self.directory = directory
        self._remote = remote

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> DaytonaChannel:
        """Return a channel whose first frames start the driver; see `Sandbox.connect`."""
        has_secrets = bool(self.settings.environment)  # The code's environment may have secrets.
        seconds = self._provider_settings.start_timeout
        launch = partial(start_driver, self._remote, self.directory, seconds, has_secrets)
        self._channel = DaytonaChannel(self._remote, launch, receive, closed)
        return self._channel

    async def set_up(self, commit: str | None) -> None:
        """Run `setup`, clone the repository and install the packages.

        Raise ConfigurationError, SandboxStartError or DaytonaError.
        """
        settings = self._provider_settings
        if settings.setup is not None:
            await run_setup(self._remote, settings.setup, settings.start_timeout)
        if commit is not None:
            await self.clone_repository(commit)
        if settings.packages:
            await install_packages(self._remote, settings.packages, settings.start_timeout)

    async def run_command(self, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        # A call whose answer was lost is not retried, because the program may be running.
        done = await retry_call(
            lambda: self._remote.process.exec(shlex.join(words), env=environment, timeout=int(SETUP_SECONDS)),
            seconds=self._provider_settings.start_timeout,
            remote=self._remote,
            is_passing=is_turned_away,
        )
        return int(done.exit_code), done.result

    def read_stderr_tail(self) -> str:
        return self._channel.stderr_tail if self._channel is not None else ""

    async def stat_file(self, place: str) -> FileStatus | None:
        try:
            info = await retry_call(lambda: self._remote.fs.get_file_info(place, CALL_SECONDS), remote=self._remote)
        except daytona.DaytonaNotFoundError:
            return None
        return FileStatus(info.mode.startswith("-"), info.size)

    async def write_file(self, place: str, data: bytes) -> None:
        await retry_call(lambda: self._remote.fs.upload_file(data, place, int(SETUP_SECONDS)), remote=self._remote)

    async def read_file(self, place: str, max_bytes: int | None) -> bytes:
        async def read() -> bytes:
            data = bytearray()
            async for piece in await self._remote.fs.download_file_stream(place, int(SETUP_SECONDS)):
                data += piece
                if max_bytes is not None and len(data) > max_bytes:
                    break
            return bytes(data)

        return await retry_call(read, remote=self._remote)

    @contextmanager
    def map_file_errors(self, failure: str) -> Iterator[None]:
        try:
            yield
        except daytona.DaytonaError as error:
            if says_gone(error) or is_transient(error):
                raise SandboxLost(
                    f"{failure}, because sandbox {self.id} does not answer: {get_message(error)}"
                ) from error
            raise VolumeError(f"{failure}: {get_message(error)}") from error

    async def label_as_kept(self, until: float, labels: dict[str, str]) -> None:
        """See `CloudSandbox.label_as_kept`. Daytona may delete an idle sandbox a minute after that time."""
        minutes = max(1, math.ceil((until - time.time()) / 60))
        remote = self._remote
        with convert_errors("it could not be kept"):
            await retry_call(lambda: remote.set_labels({**remote.labels, **labels}, CALL_SECONDS))
            await retry_call(lambda: remote.set_autostop_interval(minutes, CALL_SECONDS))
            await retry_call(lambda: remote.set_ttl(minutes, CALL_SECONDS))

    async def delete(self) -> None:
        try:
            await delete_sandbox(self._remote, self._provider_settings.has_sandbox_limit)
        except daytona.DaytonaError as error:
            warn_of_leftover(self.id, error)
