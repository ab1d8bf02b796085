"""The base class of the handles on sandboxes of a cloud provider, whose files are reached through an API."""

import posixpath
import shlex
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..sandbox.driver_settings import DriverSettings
from ..sandbox.errors import ConfigurationError, SandboxStartError, VolumeError
from ..sandbox.sandbox_api import Sandbox, describe_large_file, describe_special_file
from . import git as repository
from .host_files.files import ARCHIVE_PATH, UNPACK_ARCHIVE, HostFiles
from .provider import build_kept_labels
from .settings import SnapshotSettings
from .setup_commands import RUN_AS_ROOT


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The status of a path in a sandbox."""

    is_file: bool
    size: int  # bytes
    is_link: bool = False


class CloudSandbox(Sandbox):
    """A sandbox of a cloud provider. A provider implements the abstract methods, and `connect`."""

    layers = ()
    python = "python3"

    def __init__(self, sandbox_id: str, settings: SnapshotSettings, host_files: HostFiles, **driver: Any) -> None:
        self.id = sandbox_id
        self.settings = DriverSettings(
            volume=settings.volume_mount_path if settings.volume_name is not None else None,
            environment=settings.reveal_environment(),
            python_path=host_files.list_uploaded_directories(),
            executable=host_files.find_uploaded_python(),
            lifetime=settings.lifetime,
            **driver,
        )
        self.directory = ""  # Relative paths are below it. By default it is the sandbox's working directory.
        self._provider_settings = settings
        self._archive = host_files.archive
        self._channel: Any = None
        self._is_removed = self._has_run_code = False

    @abstractmethod
    async def run_command(self, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        """Run a program to its end. Return its status and, after a failure, its output. Raise the SDK's errors."""

    @abstractmethod
    async def stat_file(self, place: str) -> FileStatus | None:
        """Return the status of a file, or None if it is missing. Raise the SDK's errors."""

    @abstractmethod
    async def write_file(self, place: str, data: bytes) -> None:
        """Write a file and the directories above it. Raise the SDK's errors."""

    @abstractmethod
    async def read_file(self, place: str, max_bytes: int | None) -> bytes:
        """Return a file's bytes, but not many more than `max_bytes`. Raise the SDK's errors."""

    @abstractmethod
    def map_file_errors(self, failure: str) -> AbstractContextManager[None]:
        """Convert the SDK's errors to VolumeError or SandboxLost. `failure` says what could not be done."""

    @abstractmethod
    async def label_as_kept(self, until: float, labels: dict[str, str]) -> None:
        """Add these labels, and make the provider delete the sandbox at that time. Raise RlmBatchError."""

    @abstractmethod
    async def delete(self) -> None:
        """Delete the sandbox. A failure is only logged."""

    async def release(self) -> None:
        """Close this process's connection to a sandbox that is kept."""
        return

    async def clone_repository(self, commit: str) -> None:
        """Clone the repository into the directory, and check the commit out.

        Raise ConfigurationError, SandboxStartError or the SDK's errors.
        """
        url = self._provider_settings.repo_url or ""
        install = shlex.join(["sh", "-c", RUN_AS_ROOT, "install", repository.INSTALL_GIT])
        fetch = shlex.join(["sh", "-c", repository.FETCH_COMMIT, "fetch", self.directory, url, commit])
        environment = repository.build_environment(self._provider_settings.repo_token)
        status, output = await self.run_command("sh", "-c", f"{install} && {fetch}", environment=environment)
        if not status:
            return
        errors = repository.hide_credentials(" ".join(output.split()))[-1000:]
        cause = errors or f"git ended with status {status}"
        failure = f"the repository {url} could not be cloned at {commit} in a sandbox ({cause})"
        if status == repository.COMMIT_MISSING_STATUS:
            raise ConfigurationError(f"{failure}: check repo_url and repo_ref")
        raise SandboxStartError(failure)

    async def unpack_files(self) -> None:
        """Upload the host's files and unpack them. Raise ConfigurationError or the SDK's errors."""
        if self._archive is None:
            return
        await self.write_file(ARCHIVE_PATH, self._archive)
        status, output = await self.run_command("sh", "-c", UNPACK_ARCHIVE, "unpack", ARCHIVE_PATH, self.python)
        if status:
            lines = output.strip().splitlines() or ["no message"]
            raise ConfigurationError(
                f"the files of python_path and mounts could not be unpacked in a sandbox: {lines[-1][-1000:]}. "
                "Check its free disk, and mount at paths that its user may write"
            )

    def _resolve_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise VolumeError(f"{path!r} is not the path of a file")
        return posixpath.join(self.directory, path)

    def may_run_unheard(self) -> bool:
        return self._channel is not None and not self._channel.is_complete

    def expect_execution(self) -> None:
        self._has_run_code = True

    async def upload(self, path: str, data: bytes) -> None:
        place = self._resolve_path(path)
        with self.map_file_errors(f"{path} could not be written"):
            status = await self.stat_file(place) if self._has_run_code else None
            if status is not None and not status.is_file:
                raise VolumeError(describe_special_file(path, "written", is_link=status.is_link))
            await self.write_file(place, data)

    async def download(self, path: str, *, max_bytes: int | None = None) -> bytes:
        place = self._resolve_path(path)
        with self.map_file_errors(f"{path} could not be read"):
            if max_bytes is None:
                return await self.read_file(place, None)
            status = await self.stat_file(place)
            if status is not None and not status.is_file:  # A pipe would never end.
                raise VolumeError(describe_special_file(path, is_link=status.is_link))
            size = 0 if status is None else status.size
            if size <= max_bytes:
                data = await self.read_file(place, max_bytes)
                if len(data) <= max_bytes:
                    return data
                size = len(data)  # Code has appended to the file meanwhile.
            raise VolumeError(describe_large_file(path, size, max_bytes))

    async def keep(self, until: float, execution: int | None = None) -> None:
        await self.label_as_kept(until, build_kept_labels(until, execution))
        self._is_removed = True
        if self._channel is not None:
            await self._channel.close()
        await self.release()

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        if self._channel is not None:
            await self._channel.close()
        await self.delete()
