"""The creation of a Daytona sandbox and its volume. A sandbox whose creation call was lost is found by its name."""

import asyncio
import math
import uuid
from contextlib import AsyncExitStack
from typing import Any

import daytona

from ...sandbox.caller import name_parameter
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxStartError
from ..host_files.files import HostFiles
from .client import NAME_PREFIX, SharedClient, borrow_client
from .deletion import delete_leftover, find_sandbox
from .environment import Environment, find_environment, lock_other_processes
from .error_table import Meaning
from .errors import KeyRefusals, find_row, get_delay, get_status, is_transient, is_unreachable, map_error, retry_call
from .handle import IDLE_MINUTES, DaytonaSandboxHandle
from .settings import DaytonaSettings

UNREACHABLE_SECONDS = 20.0  # seconds without a connection before the address counts as wrong or the network as down
MAX_SETUPS = 3  # attempts to set up one execution's sandbox; each attempt pays for a new sandbox
LONGEST_DELAY_SECONDS = 8.0  # seconds before the creation is retried
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
    settings: DaytonaSettings, labels: dict[str, str], commit: str | None, files: HostFiles, expected: int = 1
) -> DaytonaSandboxHandle:
    """Open a sandbox with the repository, the packages and the host's files in it.

    If several sandboxes are `expected`, the set-up of the first is kept as a snapshot, and the others start from it.

    Raises:
        ConfigurationError, QuotaExceeded, SandboxStartError: No sandbox was opened, and none is left.
    """
    environment = find_environment(settings, commit)
    if environment is None:
        return await _open(settings, labels, commit, files)
    client = await borrow_client(settings)
    try:
        async with environment.lock, AsyncExitStack() as stack:
            is_kept = await environment.find_snapshot(settings, client)
            if not is_kept and environment.should_be_kept(settings, expected):
                await lock_other_processes(stack, environment.name)
                environment.has_snapshot = None  # Another process may have made it meanwhile.
                is_kept = await environment.find_snapshot(settings, client)
                if not is_kept:
                    return await _open_first(settings, labels, commit, files, environment)
    finally:
        client.release()
    if is_kept:
        try:
            return await _open(settings, labels, commit, files, environment)
        except ConfigurationError as error:
            if environment.name not in str(error):
                raise
            # The snapshot was deleted or deactivated. The next sandbox looks for it again.
            environment.has_snapshot = None
    return await _open(settings, labels, commit, files)


async def _open_first(
    settings: DaytonaSettings, labels: dict[str, str], commit: str | None, files: HostFiles, environment: Environment
) -> DaytonaSandboxHandle:
    """Open a sandbox while the others wait, and keep its set-up if that is worth it."""
    try:
        return await _open(settings, labels, commit, files, environment, is_first=True)
    except RlmBatchError as error:
        # The others wait, and would fail one after another.
        environment.failures += 1
        environment.is_refused = isinstance(error, ConfigurationError) or environment.failures == MAX_SETUPS
        raise


async def _open(
    settings: DaytonaSettings,
    labels: dict[str, str],
    commit: str | None,
    files: HostFiles,
    environment: Environment | None = None,
    *,
    is_first: bool = False,
) -> DaytonaSandboxHandle:
    """Create a sandbox, wait until it has started, and set it up.

    With an `environment`, the sandbox starts from its snapshot, or is the first, whose set-up is kept. Transient
    failures are retried for the block's `start_timeout`. An interrupted set-up is retried in a new sandbox. A reached
    account limit fails at once, because the run decides when to retry.
    """
    loop = asyncio.get_running_loop()
    start_by, attempt = loop.time() + settings.start_timeout, 0
    snapshot = environment.name if environment is not None and not is_first else None
    failure: RlmBatchError | None = None  # error of the previous set-up
    while True:
        attempt += 1
        client = await borrow_client(settings)
        try:
            remote = await _create(settings, client, labels, start_by, snapshot)
        except BaseException as error:
            client.release()
            if failure is not None and isinstance(error, SandboxStartError):
                raise SandboxStartError(f"{failure}; then {error}") from error
            raise
        handle = DaytonaSandboxHandle(settings, client, remote, files)
        try:
            await handle.ensure_end()
            if snapshot is None:
                started = loop.time()
                await handle.set_up(commit)
                if environment is not None:
                    await environment.keep(settings, client, remote, loop.time() - started)
            await handle.add_files(commit)
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
    settings: DaytonaSettings, client: SharedClient, labels: dict[str, str], start_by: float, snapshot: str | None
) -> daytona.AsyncSandbox:
    name = NAME_PREFIX + uuid.uuid4().hex[:16]
    mounts = await _mount_volume(settings, client, start_by)
    creation = _Creation(client, _make_params(settings, name, labels, mounts, snapshot))
    try:
        return await creation.run(start_by)
    except BaseException as error:
        await run_shielded(creation.undo(settings.has_sandbox_limit))
        if isinstance(error, daytona.DaytonaError):
            raise map_error(error, "no sandbox could be opened") from error
        raise


class _Creation:
    """The creation of one sandbox. Its unique name finds the sandbox even if a call fails."""

    def __init__(self, client: SharedClient, params: Any) -> None:
        self._client = client
        self._params = params
        self._call: asyncio.Future[daytona.AsyncSandbox] | None = None
        self._may_exist = False

    async def run(self, start_by: float) -> daytona.AsyncSandbox:
        """Return the started sandbox. Raise DaytonaError or SandboxStartError."""
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
                    if (
                        not is_transient(error) or find_row(error).meaning is Meaning.KEY
                    ):  # A refused key was already retried.
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
        """Delete the sandbox of a creation that failed or was cancelled."""
        if self._may_exist and self._call is not None:
            await delete_leftover(self._client, self._call, self._params.name, wait)

    async def _ask(self, seconds: float) -> daytona.AsyncSandbox:
        may_exist, self._may_exist = self._may_exist, True
        self._call = asyncio.ensure_future(self._client.sdk.create(self._params, timeout=seconds))
        try:
            return await asyncio.shield(self._call)
        except daytona.DaytonaError as error:
            # These refusals concern the creation. Other errors may come from a call with which the SDK waits for the
            # start.
            is_refused = find_row(error).meaning in (Meaning.FINAL, Meaning.QUOTA)
            self._may_exist = may_exist or not (is_refused or is_unreachable(error))
            raise

    async def _find_started(self, failure: Exception, start_by: float) -> daytona.AsyncSandbox | None:
        """Find the sandbox that a failed call created, and wait until it has started. Return None if none exists."""
        loop = asyncio.get_running_loop()
        while True:
            # After a refusal one look is enough: only an earlier call can have created the sandbox. A lost call may
            # still be running, so look several times.
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
                raise SandboxStartError(f"no sandbox could be opened: it disappeared meanwhile (it is {state})")
            if loop.time() + 1.0 > start_by:
                raise failure
            try:
                await remote.wait_for_sandbox_start(timeout=start_by - loop.time())
                return remote
            except daytona.DaytonaError as error:
                if not is_transient(error):
                    raise
                failure = error


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


async def _mount_volume(settings: DaytonaSettings, client: SharedClient, start_by: float) -> list[Any]:
    """Return the mount of the volume, after creating it if needed. Return [] if no volume is set."""
    if settings.volume_name is None:
        return []
    name, loop = settings.volume_name, asyncio.get_running_loop()
    refusal: daytona.DaytonaError | None = None  # error of the last call

    async def get_volume() -> Any:
        nonlocal refusal
        try:
            try:
                volume = await client.sdk.volume.get(name, create=True)
            except daytona.DaytonaConflictError:  # Another caller has created the volume.
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
            f"volume {name!r} was not ready within {seconds} s: raise {name_parameter('start_timeout')}"
        ) from None
    if volume.state != "ready":
        reason = f" ({volume.error_reason})" if getattr(volume, "error_reason", None) else ""
        raise ConfigurationError(
            f"Daytona's volume {name!r} is in the state {_get_text(volume.state)}{reason}: delete it in "
            f"the dashboard, or set {name_parameter('volume_name')} to another"
        )
    return [daytona.VolumeMount(volume_id=volume.id, mount_path=settings.volume_mount_path)]


def _get_text(state: Any) -> str:
    return str(getattr(state, "value", state))
