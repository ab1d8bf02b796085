"""One open sandbox of Daytona: its driver, its files, and its end."""

import asyncio
import functools
import importlib.util
import logging
import shlex
import sys
from collections.abc import Callable
from typing import Any

import daytona

from ...sandbox.driver_bundle import build_driver_code, build_driver_text
from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import RlmBatchError, SandboxLost, SandboxStartError, VolumeError
from ...sandbox.sandbox_api import Sandbox
from ...sandbox.wire.frames import encode_frame
from .channel import FILES, DaytonaChannel
from .client import SharedClient
from .deletion import delete_sandbox, warn_of_leftover
from .errors import CALL_SECONDS, SETUP_SECONDS, get_message, is_transient, is_turned_away, retry_call, says_gone
from .settings import DaytonaSettings
from .setup import clone_repository, install_packages, open_session

IDLE_MINUTES = 5  # after which Daytona ends a sandbox that nobody has called: that of a host that died
KEEP_AWAKE_SECONDS = IDLE_MINUTES * 60 / 3  # between two of our calls that say that one is in use
MODULE = "_rlm_batch_driver"  # a name that no code has for a module of its own
BOOT = f"import sys; sys.path[0] = {FILES!r}; import {MODULE} as d; del sys.path[0]; d.main(first=sys.argv[1])"

log = logging.getLogger("rlm_batch.daytona")


class DaytonaSandboxHandle(Sandbox):
    """One sandbox of Daytona."""

    provider = "daytona"
    isolation = "daytona"
    layers = ()
    python = "python3"

    def __init__(self, settings: DaytonaSettings, client: SharedClient, remote: daytona.AsyncSandbox) -> None:
        self.id = remote.id
        self.settings = DriverSettings(
            cwd=".",  # where its command starts
            volume=settings.volume_mount_path if settings.volume_name is not None else None,
            environment={name: value.get_secret_value() for name, value in settings.environment.items()},
            lifetime=settings.lifetime,
            files=FILES,
        )
        self._provider_settings = settings
        self._client = client
        self._remote = remote
        self._directory = ""  # of the clone, below the sandbox's own
        self._channel: DaytonaChannel | None = None
        self._keeping_awake: asyncio.Task[None] | None = None
        self._is_removed = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> DaytonaChannel:
        """Gives a channel whose first frame starts the driver; see `Sandbox.connect`."""
        self._channel = DaytonaChannel(self._remote, self._launch, receive, closed)
        return self._channel

    async def set_up(self, commit: str | None) -> None:
        """Clones the repository, where the code then runs, and installs the packages. Raises as `setup` does."""
        settings = self._provider_settings
        if self._remote.auto_destroy_at is None:
            await self._ensure_end()
        if commit is not None:
            # A clone whose answer was lost may be under way: only one that was turned away is made again here.
            self._directory = await retry_call(
                lambda: clone_repository(self._remote, settings, commit),
                seconds=settings.start_timeout, remote=self._remote, is_passing=is_turned_away,
            )  # fmt: skip
        if settings.packages:
            await install_packages(self._remote, settings.packages, settings.start_timeout)

    async def _ensure_end(self) -> None:
        """Sees to it that a sandbox ends that nobody calls, where Daytona does not know of a lifetime.

        An older one drops the fields that it does not know. The driver ends with the lifetime, by its own clock, from
        then on nothing keeps the sandbox awake, and what is stopped is deleted.
        """
        remote = self._remote
        try:
            if not 0 < (remote.auto_stop_interval or 0) <= IDLE_MINUTES:
                await retry_call(lambda: remote.set_autostop_interval(IDLE_MINUTES, CALL_SECONDS))
            if remote.auto_delete_interval != 0:
                await retry_call(lambda: remote.set_auto_delete_interval(0, CALL_SECONDS))
        except daytona.DaytonaError as error:
            log.warning(
                "sandbox %s has no lifetime at this Daytona, and is not ended when it is idle either (%s): if this "
                "process dies, `rlm-batch reap --provider daytona` removes it",
                *(self.id, get_message(error)),
            )

    async def _launch(self, header: dict[str, Any], body: bytes) -> tuple[str, str]:
        """Starts the driver with its first frame; returns its session and its command. Raises SandboxStartError.

        A start that was lost on its way is made anew in a session of its own, for in the old one it would wait for the
        first to end, and with a body of its own, for the first takes the one that it was given. What this leaves is a
        driver that nobody speaks to.
        """
        session = command = ""
        attempt = 0

        async def start() -> tuple[str, str]:
            nonlocal session, command, attempt
            if not command:
                try:
                    session, command = await self._prepare_start(header, body, attempt)
                except daytona.DaytonaError as error:  # after tries of its own
                    raise self._make_start_error(error) from error
            attempt += 1
            request = daytona.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
            try:
                answer = await self._remote.process.execute_session_command(session, request, int(CALL_SECONDS))
            except daytona.DaytonaError as error:
                if not is_turned_away(error):
                    command = ""
                raise
            return session, answer.cmd_id

        try:
            started = await retry_call(start, seconds=self._provider_settings.start_timeout, remote=self._remote)
        except daytona.DaytonaError as error:
            raise self._make_start_error(error) from error
        self._keeping_awake = asyncio.create_task(self._keep_awake())
        return started

    async def _prepare_start(self, header: dict[str, Any], body: bytes, attempt: int) -> tuple[str, str]:
        """Uploads the driver (once) and the first frame's body; returns a session, and the command to give it."""
        body_path = f"{FILES}/in.0.{attempt}"
        uploads = {body_path: body}
        if not attempt:
            uploads |= {f"{FILES}/{name}": data for name, data in _make_driver_files().items()}
        files = [daytona.FileUpload(data, path) for path, data in uploads.items()]
        seconds = self._provider_settings.start_timeout
        # Together: neither needs the other.
        session, _ = await asyncio.gather(
            open_session(self._remote, seconds),
            retry_call(
                functools.partial(self._remote.fs.upload_files, files, int(CALL_SECONDS)),
                seconds=seconds, remote=self._remote,
            ),
        )  # fmt: skip
        first_frame = encode_frame({**header, "file": body_path}).decode()
        command = f"{self.python} -u -c {shlex.quote(BOOT)} {shlex.quote(first_frame)}"
        return session, f"cd {shlex.quote(self._directory)} && {command}" if self._directory else command

    def _make_start_error(self, error: Exception) -> SandboxStartError:
        return SandboxStartError(f"the driver did not start in sandbox {self.id}: {get_message(error)}")

    async def _keep_awake(self) -> None:
        """Tells Daytona that the sandbox is in use: code may wait for an answer longer than one may be idle."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._provider_settings.lifetime
        while loop.time() + KEEP_AWAKE_SECONDS < end:
            await asyncio.sleep(KEEP_AWAKE_SECONDS)
            try:
                await retry_call(lambda: self._remote.refresh_activity(CALL_SECONDS))
            except daytona.DaytonaError as error:
                log.debug("sandbox %s could not be kept awake: %s", self.id, get_message(error))

    def read_stderr_tail(self) -> str:
        return self._channel.stderr_tail if self._channel is not None else ""

    async def upload(self, path: str, data: bytes) -> None:
        remote_path = self._resolve_path(path)
        try:
            await retry_call(
                lambda: self._remote.fs.upload_file(data, remote_path, int(SETUP_SECONDS)), remote=self._remote
            )
        except daytona.DaytonaError as error:
            raise self._map_file_error(error, path, "written") from error

    async def download(self, path: str) -> bytes:
        remote_path = self._resolve_path(path)
        try:
            return (
                await retry_call(
                    lambda: self._remote.fs.download_file(remote_path, int(SETUP_SECONDS)), remote=self._remote
                )
                or b""
            )
        except daytona.DaytonaError as error:
            raise self._map_file_error(error, path, "read") from error

    def _resolve_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise VolumeError(f"{path!r} is no path of a file")
        return path if path.startswith("/") or not self._directory else f"{self._directory}/{path}"

    def _map_file_error(self, error: Exception, path: str, action: str) -> RlmBatchError:
        message = get_message(error)
        if says_gone(error) or is_transient(error):
            return SandboxLost(f"{path} could not be {action}, for sandbox {self.id} does not answer: {message}")
        return VolumeError(f"{path} could not be {action}: {message}")

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
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


@functools.cache
def _make_driver_files() -> dict[str, bytes]:
    """The driver's text, and compiled for a Python such as ours: in a sandbox that has another the text is compiled."""
    text = build_driver_text()
    # A pyc that is taken without a look at its source (PEP 552): the two come from here together.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(text)
    return {
        f"{MODULE}.py": text,
        f"__pycache__/{MODULE}.{sys.implementation.cache_tag}.pyc": head + build_driver_code(),
    }
