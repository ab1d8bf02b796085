"""How a sandbox comes to be: its volume, and the call that creates it, found again where that call is lost."""

import asyncio
import math
import uuid
from typing import Any

import daytona

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, SandboxStartError
from .client import NAME_PREFIX, SharedClient, borrow_client
from .deletion import delete_leftover, find_sandbox
from .errors import get_status, is_transient, is_unreachable, map_error, retry_call
from .handle import IDLE_MINUTES, DaytonaSandboxHandle
from .settings import DaytonaSettings

START_SECONDS = 120.0  # for a sandbox to start; a cold one takes seconds, one of a new image a minute or more
STARTING = (
    "creating",
    "restoring",
    "starting",
    "resuming",
    "pending_build",
    "building_snapshot",
    "pulling_snapshot",
    "unknown",
)


async def open_sandbox(settings: DaytonaSettings, labels: dict[str, str], commit: str | None) -> DaytonaSandboxHandle:
    """A sandbox that has started, with the repository and the packages in it.

    Raises ConfigurationError, QuotaExceeded or SandboxStartError, and leaves none then.
    """
    client = await borrow_client(settings)
    try:
        remote = await _create(settings, client, labels)
    except BaseException:
        client.release()
        raise
    handle = DaytonaSandboxHandle(settings, client, remote)
    try:
        await handle.set_up(commit)
    except BaseException as error:
        await run_shielded(handle.remove())
        if isinstance(error, daytona.DaytonaError):
            raise map_error(error, "the sandbox could not be set up", settings.snapshot) from error
        raise
    return handle


async def _create(settings: DaytonaSettings, client: SharedClient, labels: dict[str, str]) -> daytona.AsyncSandbox:
    """Its name is not used again, so that it can be found whatever the call came to."""
    name = NAME_PREFIX + uuid.uuid4().hex[:16]
    params = _make_params(settings, name, labels, await _mount_volume(settings, client))
    start_by = asyncio.get_running_loop().time() + START_SECONDS
    creating = asyncio.ensure_future(client.sdk.create(params, timeout=START_SECONDS))
    may_be_created = True
    try:
        try:
            return await asyncio.shield(creating)
        except daytona.DaytonaError as error:
            may_be_created = get_status(error) not in (400, 401, 403, 404, 409, 422)
            if not is_transient(error):
                raise
            # The call, or one of those by which the SDK waits for the start, was lost: the sandbox may be there.
            return await _find_started(client, name, error, start_by)
    except BaseException as error:
        if may_be_created and not is_unreachable(error):
            await run_shielded(delete_leftover(client, creating, name, settings.has_sandbox_limit))
        if isinstance(error, daytona.DaytonaError):
            raise map_error(error, "no sandbox could be opened", settings.snapshot) from error
        raise


def _make_params(settings: DaytonaSettings, name: str, labels: dict[str, str], mounts: list[Any]) -> Any:
    common: dict[str, Any] = {
        "name": name,
        "labels": dict(labels),  # the SDK adds one of its own
        "volumes": mounts or None,
        "ephemeral": True,
        "auto_stop_interval": IDLE_MINUTES,
        "ttl_minutes": math.ceil(settings.lifetime / 60),
        "network_block_all": settings.network_block_all or None,
        "network_allow_list": settings.network_allow_list,
        "domain_allow_list": settings.domain_allow_list,
    }
    if settings.image is None:
        return daytona.CreateSandboxFromSnapshotParams(snapshot=settings.snapshot, **common)
    resources = daytona.Resources(cpu=settings.cpu, memory=settings.memory, disk=settings.disk)
    return daytona.CreateSandboxFromImageParams(image=settings.image, resources=resources, **common)


async def _find_started(client: SharedClient, name: str, failure: Exception, start_by: float) -> daytona.AsyncSandbox:
    """The sandbox that a lost call has created, once it has started. Raises `failure` where there is none."""
    loop = asyncio.get_running_loop()
    while True:
        # A call that was refused for now has either made nothing or was not the first. Where Daytona cannot be
        # reached it is asked once more: nothing more can be done either.
        is_away = is_unreachable(failure)
        looks = 1 if is_away or get_status(failure) == 429 else 3
        remote = await find_sandbox(client, name, looks, tries=2 if is_away else None)
        state = _get_text(remote.state) if remote is not None else ""
        if remote is not None and state == "started":
            return remote
        if remote is not None and state in ("error", "build_failed"):
            raise SandboxStartError(f"no sandbox could be opened: it ended as {state} ({remote.error_reason})")
        if remote is None or state not in STARTING or loop.time() + 1.0 > start_by:
            raise failure
        try:
            await remote.wait_for_sandbox_start(timeout=start_by - loop.time())
            return remote
        except daytona.DaytonaError as error:
            if not is_transient(error):
                raise
            failure = error


async def _mount_volume(settings: DaytonaSettings, client: SharedClient) -> list[Any]:
    """The mount of the volume, which is made where it is new and waited for; none where there is no volume."""
    if settings.volume_name is None:
        return []
    name = settings.volume_name

    async def get_volume() -> Any:
        try:
            return await client.sdk.volume.get(name, create=True)
        except daytona.DaytonaConflictError:  # somebody else has made it meanwhile
            return await client.sdk.volume.get(name)

    try:
        volume = await retry_call(get_volume)
        async with asyncio.timeout(START_SECONDS):
            pause = 0.1
            while volume.state in ("pending_create", "creating"):
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
                volume = await retry_call(get_volume)
    except daytona.DaytonaError as error:
        raise map_error(error, f"volume {name!r} could not be had", settings.snapshot) from error
    except TimeoutError:
        raise SandboxStartError(f"volume {name!r} was not ready within {START_SECONDS:.0f} s: try again") from None
    if volume.state != "ready":
        reason = f" ({volume.error_reason})" if getattr(volume, "error_reason", None) else ""
        raise ConfigurationError(
            f"Daytona's volume {name!r} is in the state {_get_text(volume.state)}{reason}: delete it in the dashboard, "
            "or name another with volume_name"
        )
    return [daytona.VolumeMount(volume_id=volume.id, mount_path=settings.volume_mount_path)]


def _get_text(state: Any) -> str:
    return str(getattr(state, "value", state))
