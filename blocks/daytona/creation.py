"""The creation of a Daytona sandbox and its volume. A sandbox whose creation call was lost is found by its name."""

import asyncio
import math
import time
import uuid
from functools import partial
from typing import Any

import aiohttp
import daytona

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, SandboxStartError
from ..host_files.files import HostFiles
from .account import delete_leftover, find_sandbox
from .channel import IDLE_MINUTES
from .client import NAME_PREFIX
from .errors import ENDED_STATES, Meaning, convert_errors, find_row, get_state, is_transient, retry_call
from .handle import DaytonaSandboxHandle
from .settings import DaytonaSettings
from .setup import name_clone
from .snapshots import Environment, find_environment


async def open_sandbox(
    client: daytona.AsyncDaytona,
    settings: DaytonaSettings,
    labels: dict[str, str],
    commit: str | None,
    files: HostFiles,
    expected: int = 1,
) -> DaytonaSandboxHandle:
    """Open a sandbox with the repository, the packages and the host's files in it.

    If several sandboxes are `expected`, the set-up of the first is kept as a snapshot, and the others start from it.

    Raises:
        ConfigurationError, QuotaExceeded, SandboxStartError, DaytonaError: No sandbox was opened, and none is left.
    """
    environment = find_environment(settings, commit)
    open_one = partial(_open, client, settings, labels, commit, files)
    if environment is None:
        return await open_one()
    async with environment.lock:  # The others wait until the set-up of the first is kept or not.
        has_snapshot = await environment.find_snapshot(settings, client)
        if not has_snapshot and not environment.is_refused and settings.keeps_set_up(expected):
            return await open_one(environment)
    if has_snapshot:
        try:
            return await open_one(snapshot=environment.name)
        except ConfigurationError:  # The snapshot may have been deleted. The next sandbox looks for it again.
            environment.has_snapshot = None
    return await open_one()


async def _open(
    client: daytona.AsyncDaytona,
    settings: DaytonaSettings,
    labels: dict[str, str],
    commit: str | None,
    files: HostFiles,
    environment: Environment | None = None,
    *,
    snapshot: str | None = None,
) -> DaytonaSandboxHandle:
    """Open one sandbox from a `snapshot` of the set-up. Without one, set the sandbox up.

    With an `environment`, keep this set-up as a snapshot.
    """
    remote = await _create(client, settings, labels, snapshot)
    directory = "" if commit is None else name_clone(settings)
    handle = DaytonaSandboxHandle(settings, remote, files, directory)
    try:
        if snapshot is None:
            began = time.monotonic()
            await handle.set_up(commit)
            if environment is not None:
                await environment.keep(settings, client, remote, time.monotonic() - began)
        await handle.unpack_files()
        return handle
    except BaseException:
        await run_shielded(handle.remove())
        raise


async def _create(
    client: daytona.AsyncDaytona, settings: DaytonaSettings, labels: dict[str, str], snapshot: str | None
) -> daytona.AsyncSandbox:
    """Return a started sandbox. On an error or a cancellation, leave none.

    Transient failures are retried for the block's `start_timeout`. A reached account limit fails at once, because the
    run decides when to retry.
    """
    start_by = time.monotonic() + settings.start_timeout
    mounts = await _mount_volume(settings, client)
    params = _make_params(settings, NAME_PREFIX + uuid.uuid4().hex[:16], labels, mounts, snapshot)
    creation = Creation(client, params, start_by)

    def is_passing(error: Exception) -> bool:
        return is_transient(error) and find_row(error).meaning is not Meaning.THROTTLED

    with convert_errors("no sandbox could be opened"):
        try:
            return await retry_call(creation.try_once, seconds=start_by - time.monotonic(), is_passing=is_passing)
        except BaseException as error:
            is_wrong_key = isinstance(error, daytona.DaytonaError) and find_row(error).meaning is Meaning.KEY
            if creation.may_exist and creation.call is not None and not is_wrong_key:
                await run_shielded(delete_leftover(client, creation.call, params.name, settings.has_sandbox_limit))
            raise


class Creation:
    """The creation of one sandbox, in one or several attempts.

    Attributes:
        call: The call to Daytona of the last attempt; None before the first.
        may_exist: True if an attempt may have created the sandbox.
    """

    def __init__(self, client: daytona.AsyncDaytona, params: Any, start_by: float) -> None:
        self.call: asyncio.Future[daytona.AsyncSandbox] | None = None
        self.may_exist = False
        self._client = client
        self._params = params
        self._start_by = start_by

    async def try_once(self) -> daytona.AsyncSandbox:
        """Create the sandbox, or find the one of a failed call. Raise DaytonaError or SandboxStartError."""
        existed = self.may_exist
        self.may_exist = True
        timeout = max(1.0, self._start_by - time.monotonic())
        self.call = asyncio.ensure_future(self._client.create(self._params, timeout=timeout))
        try:
            return await asyncio.shield(self.call)
        except daytona.DaytonaError as error:
            # These errors are of the creating call. Other errors may be of a call with which the SDK waits for the
            # start.
            meaning = find_row(error).meaning
            is_unsent = isinstance(error.__cause__, aiohttp.ClientConnectorError)
            is_refused = meaning in (Meaning.FINAL, Meaning.QUOTA)
            self.may_exist = existed or not (is_unsent or is_refused)
            if not self.may_exist or meaning is Meaning.KEY:
                raise
            remote = await self._find_started()
            if remote is None:
                raise
            return remote

    async def _find_started(self) -> daytona.AsyncSandbox | None:
        """Find the sandbox that a failed call created, and wait until it has started. Return None if none exists.

        If the call is still running, the next attempt is refused, because the name is taken.
        """
        remote = await find_sandbox(self._client, self._params.name)
        if remote is None:
            return None
        state = get_state(remote)
        if state in ENDED_STATES:
            raise SandboxStartError(f"no sandbox could be opened: it ended as {state} ({remote.error_reason})")
        if state != "started":
            await remote.wait_for_sandbox_start(timeout=max(1.0, self._start_by - time.monotonic()))
        return remote


def _make_params(
    settings: DaytonaSettings, name: str, labels: dict[str, str], mounts: list[Any], snapshot: str | None
) -> Any:
    common: dict[str, Any] = {
        "name": name,
        "labels": dict(labels),  # a copy, because the SDK adds a label
        "volumes": mounts or None,
        "ephemeral": True,
        "auto_stop_interval": IDLE_MINUTES,
        "ttl_minutes": math.ceil(settings.lifetime / 60),
        "queue_timeout": math.ceil(settings.start_timeout / 60),  # minutes in which Daytona finds a machine
        "network_block_all": settings.network_block_all or None,
        "network_allow_list": settings.network_allow_list,
        "domain_allow_list": settings.domain_allow_list,
    }
    if snapshot is not None or settings.image is None:
        return daytona.CreateSandboxFromSnapshotParams(snapshot=snapshot or settings.snapshot, **common)
    resources = daytona.Resources(cpu=settings.cpu, memory=settings.memory, disk=settings.disk)
    return daytona.CreateSandboxFromImageParams(image=settings.image, resources=resources, **common)


async def _mount_volume(settings: DaytonaSettings, client: daytona.AsyncDaytona) -> list[Any]:
    """Return the mount of the volume, which is created if it is missing. Return [] without `volume_name`."""
    name = settings.volume_name
    if name is None:
        return []

    async def get_volume() -> Any:
        volume = await client.volume.get(name, create=True)
        if get_state(volume) in ("pending_create", "creating"):
            raise daytona.DaytonaError(f"its state is {get_state(volume)}")  # `retry_call` asks again.
        return volume

    with convert_errors(f"volume {name!r} could not be used"):
        volume = await retry_call(get_volume, seconds=settings.start_timeout)
    if get_state(volume) != "ready":
        reason = f" ({volume.error_reason})" if volume.error_reason else ""
        raise ConfigurationError(
            f"Daytona's volume {name!r} is in the state {get_state(volume)}{reason}: delete it in the dashboard, or "
            "set `volume_name` to another"
        )
    return [daytona.VolumeMount(volume_id=volume.id, mount_path=settings.volume_mount_path)]
