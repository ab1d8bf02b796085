"""How a sandbox comes to be: its volume, and the call that creates it, found again where that call is lost."""

import asyncio
import math
import uuid
from typing import Any

import daytona

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxStartError
from ..host_files.files import HostFiles
from .client import NAME_PREFIX, SharedClient, borrow_client
from .deletion import delete_leftover, find_sandbox
from .error_table import Meaning
from .errors import KeyRefusals, find_row, get_delay, get_status, is_transient, is_unreachable, map_error, retry_call
from .handle import IDLE_MINUTES, DaytonaSandboxHandle
from .settings import DaytonaSettings

UNREACHABLE_SECONDS = 20.0  # in which nobody answers at an address: it is a wrong one, or there is no network
MAX_SETUPS = 3  # of one execution's sandbox, each in another one, which is paid for
LONGEST_DELAY_SECONDS = 8.0  # before a creation is asked for again
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


async def open_sandbox(
    settings: DaytonaSettings, labels: dict[str, str], commit: str | None, files: HostFiles
) -> DaytonaSandboxHandle:
    """A sandbox that has started, with the repository, the packages and the host's files in it.

    What may pass is tried again for the block's `start_timeout`; a set-up that was cut off, in another sandbox. That
    the account's limits are reached is told at once, for it is the run that knows when to ask again. Raises
    ConfigurationError, QuotaExceeded or SandboxStartError, and leaves none then.
    """
    loop = asyncio.get_running_loop()
    start_by, attempt = loop.time() + settings.start_timeout, 0
    failure: RlmBatchError | None = None  # of the set-up before
    while True:
        attempt += 1
        client = await borrow_client(settings)
        try:
            remote = await _create(settings, client, labels, start_by)
        except BaseException as error:
            client.release()
            if failure is not None and isinstance(error, SandboxStartError):
                raise SandboxStartError(f"{failure}; then {error}") from error
            raise
        handle = DaytonaSandboxHandle(settings, client, remote, files)
        try:
            await handle.set_up(commit)
            return handle
        except BaseException as error:
            await run_shielded(handle.remove())
            if not isinstance(error, daytona.DaytonaError):
                raise
            failure = map_error(error, "the sandbox could not be set up")
            delay = get_delay(error, attempt + 1, LONGEST_DELAY_SECONDS)
            if not is_transient(error) or attempt == MAX_SETUPS or loop.time() + delay > start_by:
                raise failure from error
            await asyncio.sleep(delay)


async def _create(
    settings: DaytonaSettings, client: SharedClient, labels: dict[str, str], start_by: float
) -> daytona.AsyncSandbox:
    name = NAME_PREFIX + uuid.uuid4().hex[:16]
    creation = _Creation(client, _make_params(settings, name, labels, await _mount_volume(settings, client, start_by)))
    try:
        return await creation.run(start_by)
    except BaseException as error:
        await run_shielded(creation.undo(settings.has_sandbox_limit))
        if isinstance(error, daytona.DaytonaError):
            raise map_error(error, "no sandbox could be opened") from error
        raise


class _Creation:
    """A sandbox on its way. Its name is used for it alone, so that it can be found whatever a call came to."""

    def __init__(self, client: SharedClient, params: Any) -> None:
        self._client = client
        self._params = params
        self._call: asyncio.Future[daytona.AsyncSandbox] | None = None
        self._may_exist = False

    async def run(self, start_by: float) -> daytona.AsyncSandbox:
        """The sandbox, which has started. Raises DaytonaError or SandboxStartError."""
        loop, key_refusals, attempt = asyncio.get_running_loop(), KeyRefusals(), 0
        away_since: float | None = None
        while True:
            try:
                return await self._ask(max(1.0, start_by - loop.time()))
            except daytona.DaytonaError as error:
                failure = error
            if self._may_exist:
                try:
                    remote = await self._find_started(failure, start_by)
                except daytona.DaytonaError as error:
                    if not is_transient(error) or find_row(error).meaning is Meaning.KEY:  # it has been tried again
                        self._may_exist = self._may_exist and not is_transient(error)
                        raise
                    failure, remote = error, None
                if remote is not None:
                    return remote
            away_since = (away_since or loop.time()) if is_unreachable(failure) else None
            give_up_at = start_by if away_since is None else min(start_by, away_since + UNREACHABLE_SECONDS)
            meaning = find_row(failure).meaning
            if not is_transient(failure) or meaning is Meaning.THROTTLED:
                raise failure
            is_key = meaning is Meaning.KEY
            delay = key_refusals.choose_delay() if is_key else get_delay(failure, attempt + 2, LONGEST_DELAY_SECONDS)
            if delay is None or loop.time() + delay > give_up_at:
                raise failure
            await asyncio.sleep(delay)
            attempt += 1

    async def undo(self, wait: bool) -> None:
        """Deletes the sandbox of a creation that failed, or that nobody waits for any more."""
        if self._may_exist and self._call is not None:
            await delete_leftover(self._client, self._call, self._params.name, wait)

    async def _ask(self, seconds: float) -> daytona.AsyncSandbox:
        may_exist, self._may_exist = self._may_exist, True
        self._call = asyncio.ensure_future(self._client.sdk.create(self._params, timeout=seconds))
        try:
            return await asyncio.shield(self._call)
        except daytona.DaytonaError as error:
            # Those answers are of the creation itself. Another may be of a call by which the SDK waits for the start.
            is_refused = find_row(error).meaning in (Meaning.FINAL, Meaning.QUOTA)
            self._may_exist = may_exist or not (is_refused or is_unreachable(error))
            raise

    async def _find_started(self, failure: Exception, start_by: float) -> daytona.AsyncSandbox | None:
        """The sandbox that a call has created before it failed, once it has started; None where there is none."""
        loop = asyncio.get_running_loop()
        while True:
            # A call that was refused has either made nothing or was not the first; one that was lost may be under way.
            status = get_status(failure)
            looks = 3 if status is None or status >= 500 else 1
            remote = await find_sandbox(self._client, self._params.name, looks)
            if remote is None:
                return None
            state = _get_text(remote.state)
            if state == "started":
                return remote
            if state in ("error", "build_failed"):
                raise SandboxStartError(f"no sandbox could be opened: it ended as {state} ({remote.error_reason})")
            if state not in STARTING:
                raise SandboxStartError(f"no sandbox could be opened: it went away meanwhile (it is {state})")
            if loop.time() + 1.0 > start_by:
                raise failure
            try:
                await remote.wait_for_sandbox_start(timeout=start_by - loop.time())
                return remote
            except daytona.DaytonaError as error:
                if not is_transient(error):
                    raise
                failure = error


def _make_params(settings: DaytonaSettings, name: str, labels: dict[str, str], mounts: list[Any]) -> Any:
    common: dict[str, Any] = {
        "name": name,
        "labels": dict(labels),  # the SDK adds one of its own
        "volumes": mounts or None,
        "ephemeral": True,
        "auto_stop_interval": IDLE_MINUTES,
        "ttl_minutes": math.ceil(settings.lifetime / 60),
        "queue_timeout": math.ceil(settings.start_timeout / 60),  # in which a machine is found for it
        "network_block_all": settings.network_block_all or None,
        "network_allow_list": settings.network_allow_list,
        "domain_allow_list": settings.domain_allow_list,
    }
    if settings.image is None:
        return daytona.CreateSandboxFromSnapshotParams(snapshot=settings.snapshot, **common)
    resources = daytona.Resources(cpu=settings.cpu, memory=settings.memory, disk=settings.disk)
    return daytona.CreateSandboxFromImageParams(image=settings.image, resources=resources, **common)


async def _mount_volume(settings: DaytonaSettings, client: SharedClient, start_by: float) -> list[Any]:
    """The mount of the volume, which is made where it is new and waited for; none where there is no volume."""
    if settings.volume_name is None:
        return []
    name, loop = settings.volume_name, asyncio.get_running_loop()
    refusal: daytona.DaytonaError | None = None  # of the last call

    async def get_volume() -> Any:
        nonlocal refusal
        try:
            try:
                volume = await client.sdk.volume.get(name, create=True)
            except daytona.DaytonaConflictError:  # somebody else has made it meanwhile
                volume = await client.sdk.volume.get(name)
        except daytona.DaytonaError as error:
            refusal = error
            raise
        refusal = None
        return volume

    try:
        async with asyncio.timeout_at(start_by):
            volume = await retry_call(get_volume, seconds=start_by - loop.time())
            pause = 0.1
            while volume.state in ("pending_create", "creating"):
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
                volume = await retry_call(get_volume, seconds=start_by - loop.time())
    except daytona.DaytonaError as error:
        raise map_error(error, f"volume {name!r} could not be had") from error
    except TimeoutError:
        if refusal is not None:
            raise map_error(refusal, f"volume {name!r} could not be had") from None
        seconds = settings.start_timeout
        raise SandboxStartError(
            f"volume {name!r} was not ready within {seconds} s (start_timeout): try again"
        ) from None
    if volume.state != "ready":
        reason = f" ({volume.error_reason})" if getattr(volume, "error_reason", None) else ""
        raise ConfigurationError(
            f"Daytona's volume {name!r} is in the state {_get_text(volume.state)}{reason}: delete it in the dashboard, "
            "or name another with volume_name"
        )
    return [daytona.VolumeMount(volume_id=volume.id, mount_path=settings.volume_mount_path)]


def _get_text(state: Any) -> str:
    return str(getattr(state, "value", state))
