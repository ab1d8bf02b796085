"""Sandboxes of Daytona: the provider's settings, and the adapter to its SDK's asynchronous client.

The SDK is imported when the first sandbox is opened: that costs seconds and a hundred megabytes, once for a process.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib.util
import logging
import marshal
import math
import os
import random
import re
import shlex
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, PrivateAttr, SecretStr, model_validator

from ...sandbox import driver
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import (
    ConfigurationError,
    QuotaExceeded,
    RlmBatchError,
    SandboxLost,
    SandboxStartError,
    VolumeError,
)
from ...sandbox.provider_api import DriverSettings, Sandbox
from .. import git as repository
from ..provider import SandboxInfo, SandboxProvider
from ..sandbox_volume import SandboxVolume

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

T = TypeVar("T")

MANAGED = {"managed-by": "rlm-batch"}
PREFIX = "rlm-batch-"  # of a sandbox's name
IDLE_MINUTES = 5  # after which Daytona ends a sandbox that nobody has called: that of a host that died
STAY_AWAKE = IDLE_MINUTES * 60 / 3  # seconds between two of our calls that say that one is in use
START_SECONDS = 120.0  # for a sandbox to start; a cold one takes seconds, one of a new image a minute or more
CALL_SECONDS = 30.0  # for one call's answer
SETUP_SECONDS = 1800.0  # for a clone, or for pip: some packages are compiled
TRIES = 7  # of a call that may be made twice; with the pauses between them some 7 s
GIVE_UP = 60.0  # seconds without one call's success, or one reconnection's, after which a sandbox is taken for lost
LAST_WORDS = 5.0  # seconds for a log to come to its end, a second or more after its command's
INPUT_LIMIT = 32 * 1024  # bytes in one input: the pipe behind it holds 64 KiB, and more would block the daemon's call
CLIENT_IDLE = 30.0  # seconds that a client without sandboxes stays open for the next
LONGEST_WAIT = 20.0  # seconds that a refused call waits where it is told to wait longer
FILES = "/tmp/rlm-batch"  # the driver's own directory in a sandbox
MODULE = "_rlm_batch_driver"  # a name that no code has for a module of its own
BOOT = f"import sys; sys.path[0] = {FILES!r}; import {MODULE} as d; del sys.path[0]; d.main(first=sys.argv[1])"
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
# What it says of one that is being removed, or was stopped, comes from its proxy; what is not there its API says.
GONE = re.compile(r"Sandbox (with ID or name \S+ not found|\S+ is not started)")
NO_CAPACITY = re.compile(r"\b(limit|quota)s? (has been |is )?(exceeded|reached)", re.IGNORECASE)

log = logging.getLogger("rlm_batch.daytona")


class DaytonaSandbox(SandboxProvider, Block):
    """Sandboxes of Daytona, for which an account and an API key are needed.

    Without `snapshot` and `image` they are made from the account's default snapshot, which Daytona keeps warm. What is
    not set here is taken from the SDK's environment: DAYTONA_API_KEY, DAYTONA_API_URL and DAYTONA_TARGET.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import DaytonaSandbox

        sandbox = DaytonaSandbox.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str] = "Daytona Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "daytona-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = "Runs code in Daytona's sandboxes."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://www.daytona.io/docs/")  # type: ignore[misc]
    _known: bool = PrivateAttr(default=False)  # whether the account has been asked once
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]
    provider_name: ClassVar[str] = "daytona"

    volume_mount_path: str = Field(
        default="/home/daytona/memory",
        title="Mount path",
        pattern="^/.",
        description="Where the code finds the volume.",
    )
    api_key: SecretStr | None = Field(
        default=None, title="API key", description="By default the environment variable DAYTONA_API_KEY."
    )
    api_url: str | None = Field(
        default=None,
        title="API address",
        description="By default the environment variable DAYTONA_API_URL, or Daytona's own service.",
    )
    target: str | None = Field(
        default=None, title="Region", description="By default DAYTONA_TARGET, or the organization's region."
    )
    snapshot: str | None = Field(
        default=None, title="Snapshot", description="The snapshot that sandboxes are made from; it needs Python 3.9."
    )
    image: str | None = Field(
        default=None,
        title="Image",
        description="A container image to build sandboxes from in place of a snapshot; it needs Python 3.9.",
    )
    cpu: int | None = Field(default=None, ge=1, title="CPUs", description="Cores of each sandbox; only with an image.")
    memory: int | None = Field(
        default=None, ge=1, title="Memory", description="GiB of memory of each sandbox; only with an image."
    )
    disk: int | None = Field(
        default=None, ge=1, title="Disk", description="GiB of disk of each sandbox; only with an image."
    )
    network_block_all: bool = Field(
        default=False, title="No network", description="Cut the sandboxes off from the network."
    )
    network_allow_list: str | None = Field(
        default=None,
        title="Allowed networks",
        description="Comma-separated CIDR blocks that code may reach; by default what the account may.",
    )
    domain_allow_list: str | None = Field(
        default=None, title="Allowed domains", description="Comma-separated domains that code may reach."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> DaytonaSandbox:
        if self.snapshot is not None and self.image is not None:
            raise ValueError("a sandbox is made from a snapshot or from an image, not from both")
        if self.image is None and (self.cpu or self.memory or self.disk):
            raise ValueError("cpu, memory and disk go with an image: a snapshot brings its own")
        return self

    # -- what a provider does

    async def open(self, labels: dict[str, str]) -> DaytonaBox:
        """Opens a sandbox, clones the repository into it and installs the packages.

        Raises ConfigurationError, QuotaExceeded or SandboxStartError; what was created has been removed then.
        """
        commit = await self.commit()
        client = await self._client()
        try:
            mounts = await self._volume(client)
            name = PREFIX + uuid.uuid4().hex[:16]
            remote = await self._create(client, self._params(name, labels, mounts))
        except BaseException:
            client.release()
            raise
        box = DaytonaBox(self, client, remote)
        try:
            if commit is not None:
                await box.clone(commit)
            if self.packages:
                await box.install(self.packages)
        except BaseException as error:
            await run_shielded(box.remove())
            if isinstance(error, _sdk().DaytonaError):
                raise self._error(error, "the sandbox could not be set up") from error
            raise
        return box

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes of the account that carry our labels."""

        async def listed() -> list[SandboxInfo]:
            query = _sdk().ListSandboxesQuery(labels=MANAGED)
            return [SandboxInfo(found.id, dict(found.labels)) async for found in client.sdk.list(query, CALL_SECONDS)]

        client = await self._client()
        try:
            return await _again(listed)
        except _sdk().DaytonaError as error:
            raise self._error(error, "the sandboxes could not be listed") from error
        finally:
            client.release()

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Removes a sandbox of the account."""
        client = await self._client()
        try:
            await _delete(client, sandbox_id)
        except _sdk().DaytonaError as error:
            raise self._error(error, f"sandbox {sandbox_id} could not be removed") from error
        finally:
            client.release()

    async def check(self) -> str:
        """Where sandboxes come from, once the account has accepted the key. Raises ConfigurationError."""
        if not self._known:
            client = await self._client()
            try:
                query = _sdk().ListSandboxesQuery(labels=MANAGED, limit=1)
                await _again(lambda: anext(client.sdk.list(query, CALL_SECONDS), None))
                self._known = True
            except _sdk().DaytonaError as error:
                mapped = self._error(error, "Daytona could not be asked")
                if isinstance(mapped, ConfigurationError):
                    raise mapped from error
                log.warning("%s", mapped)  # it may answer when the first sandbox is opened
            finally:
                client.release()
        origin = f"image {self.image}" if self.image else f"snapshot {self.snapshot or 'of the account'}"
        return f"daytona ({urlsplit(self._address()).netloc}, {origin})"

    async def open_volume(self, name: str) -> SandboxVolume:
        """The volume of that name, reached from a sandbox."""
        return SandboxVolume(self, name)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings, and what the sandboxes are made of and may reach."""
        found = await super().fingerprint()
        for name in ("snapshot", "image", "cpu", "memory", "disk", "network_allow_list", "domain_allow_list"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return {**found, "network_block_all": True} if self.network_block_all else found

    def has_credentials(self) -> bool:
        """Whether there is a key on the block or in the environment."""
        return self.api_key is not None or any(
            os.environ.get(name) for name in ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")
        )

    # -- creating

    def _params(self, name: str, labels: dict[str, str], mounts: list[Any]) -> Any:
        sdk = _sdk()
        common: dict[str, Any] = {
            "name": name,
            "labels": dict(labels),  # the SDK adds one of its own
            "volumes": mounts or None,
            "ephemeral": True,
            "auto_stop_interval": IDLE_MINUTES,
            "ttl_minutes": math.ceil(self.lifetime / 60),
            "network_block_all": self.network_block_all or None,
            "network_allow_list": self.network_allow_list,
            "domain_allow_list": self.domain_allow_list,
        }
        if self.image is None:
            return sdk.CreateSandboxFromSnapshotParams(snapshot=self.snapshot, **common)
        resources = sdk.Resources(cpu=self.cpu, memory=self.memory, disk=self.disk)
        return sdk.CreateSandboxFromImageParams(image=self.image, resources=resources, **common)

    async def _create(self, client: _Client, params: Any) -> AsyncSandbox:
        """Creates a sandbox of a name that is not used again, so that it can be found whatever the call came to."""
        until = asyncio.get_running_loop().time() + START_SECONDS
        creating = asyncio.ensure_future(client.sdk.create(params, timeout=START_SECONDS))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await run_shielded(_abandon(client, creating, params.name, self.counted))
            raise
        except _sdk().DaytonaError as error:
            if not _transient(error):
                await run_shielded(_remove_named(client, params.name, self._looks(error), self.counted))
                raise self._error(error, "no sandbox could be opened") from error
            failure = error
        # The call, or one of those by which the SDK waits for the start, was lost: the sandbox may be there.
        try:
            return await self._started(client, params.name, failure, until)
        except BaseException as error:
            if not _unreachable(error):
                await run_shielded(_remove_named(client, params.name, 1, self.counted))
            if isinstance(error, _sdk().DaytonaError):
                raise self._error(error, "no sandbox could be opened") from error
            raise

    async def _started(self, client: _Client, name: str, failure: Exception, until: float) -> AsyncSandbox:
        """The sandbox that a lost call has created, once it has started. Raises `failure` where there is none."""
        loop = asyncio.get_running_loop()
        while True:
            # A call that was refused for now has either made nothing or was not the first. Where Daytona cannot be
            # reached it is asked once more: nothing more can be done either.
            away = _unreachable(failure)
            looks = 1 if away or getattr(failure, "status_code", None) == 429 else 3
            remote = await _find(client, name, looks, tries=2 if away else None)
            state = _text(remote.state) if remote is not None else ""
            if remote is not None and state == "started":
                return remote
            if remote is not None and state in ("error", "build_failed"):
                raise SandboxStartError(f"no sandbox could be opened: it ended as {state} ({remote.error_reason})")
            if remote is None or state not in STARTING or loop.time() + 1.0 > until:
                raise failure
            try:
                await remote.wait_for_sandbox_start(timeout=until - loop.time())
                return remote
            except _sdk().DaytonaError as error:
                if not _transient(error):
                    raise
                failure = error

    @staticmethod
    def _looks(error: Exception) -> int:
        """How often to look for a sandbox after this error: not at all where nothing can have been created."""
        return 0 if getattr(error, "status_code", None) in (400, 401, 403, 404, 409, 422) else 1

    async def _volume(self, client: _Client) -> list[Any]:
        """The volume, made where it is new and ready to be mounted."""
        if self.volume_name is None:
            return []
        sdk, name = _sdk(), self.volume_name

        async def found() -> Any:
            try:
                return await client.sdk.volume.get(name, create=True)
            except sdk.DaytonaConflictError:  # somebody else has made it meanwhile
                return await client.sdk.volume.get(name)

        try:
            volume = await _again(found)
            async with asyncio.timeout(START_SECONDS):
                pause = 0.1
                while volume.state in ("pending_create", "creating"):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 2.0)
                    volume = await _again(found)
        except sdk.DaytonaError as error:
            raise self._error(error, f"volume {name!r} could not be had") from error
        except TimeoutError:
            raise SandboxStartError(f"volume {name!r} was not ready within {START_SECONDS:.0f} s: try again") from None
        if volume.state != "ready":
            why = f" ({volume.error_reason})" if getattr(volume, "error_reason", None) else ""
            raise ConfigurationError(
                f"Daytona's volume {name!r} is in the state {_text(volume.state)}{why}: delete it in the dashboard, or "
                "name another with volume_name"
            )
        return [sdk.VolumeMount(volume_id=volume.id, mount_path=self.volume_mount_path)]

    # -- the account

    def _address(self) -> str:
        return self.api_url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"

    async def _client(self) -> _Client:
        key = self.api_key.get_secret_value() if self.api_key is not None else None
        try:
            return await _borrow((key, self.api_url, self.target))
        except _sdk().DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "no credentials for Daytona: set api_key on the block, or the environment variable DAYTONA_API_KEY"
            ) from error

    def _error(self, error: BaseException, what: str) -> RlmBatchError:
        """Ours for one of the SDK's, with the provider's own message."""
        status, said = getattr(error, "status_code", None), _said(error)
        if GONE.search(said):
            return SandboxStartError(f"{what}: it went away meanwhile ({said})")
        if status == 401:
            return ConfigurationError(
                f"Daytona refused the API key ({said}): set api_key on the block, or DAYTONA_API_KEY, to a valid one"
            )
        if status == 429:
            return QuotaExceeded(f"{what}: Daytona refused for now ({said})", retry_after=_retry_after(error))
        # What an exhausted account is refused with has no status and no code of its own.
        if status in (400, 402, 403) and NO_CAPACITY.search(said):
            return QuotaExceeded(
                f"{what}: the account's resources are used up ({said}); wait for other sandboxes to end, use fewer "
                "workers, or raise the account's limits in Daytona's dashboard"
            )
        if status == 403:
            return ConfigurationError(f"{what}: Daytona does not allow it ({said}); use a key that may")
        if status == 404 and self.snapshot is not None:
            return ConfigurationError(
                f"{what}: Daytona has no snapshot {self.snapshot!r} ({said}); name one of the account's with snapshot"
            )
        if status in (400, 402, 404, 409, 422):
            return ConfigurationError(f"{what}: Daytona refused the block's settings ({said}); change them")
        return SandboxStartError(f"{what}: {said}")


# -------------------------------------------------------------------------------------------------------------- clients


@functools.cache
def _sdk() -> Any:
    import daytona

    return daytona


def _load() -> None:
    """Imports what a client is made of; the SDK's own import leaves it until it is asked for."""
    _ = _sdk().AsyncDaytona


class _Client:
    """The SDK's client of one event loop, with what it costs to make it shared by every sandbox of that loop."""

    def __init__(self, access: tuple[str | None, str | None, str | None], forget: Callable[[], object]) -> None:
        key, url, target = access
        config = _sdk().DaytonaConfig(
            # A log that is followed holds a connection: a pool with a limit would come to a standstill.
            api_key=key, api_url=url, target=target, connection_pool_maxsize=None,
        )  # fmt: skip
        self.sdk: AsyncDaytona = _sdk().AsyncDaytona(config)
        self._users = 0
        self._forget = forget
        self._changed = asyncio.Event()
        # A context of its own: what borrowed the client first shall not be kept alive by it.
        self._task = asyncio.get_running_loop().create_task(self._keep(), context=contextvars.Context())

    def borrow(self) -> _Client:
        self._users += 1
        self._changed.set()
        return self

    def release(self) -> None:
        self._users -= 1
        self._changed.set()

    async def _keep(self) -> None:
        """Closes the client when nobody has used it for a while, or when the loop ends."""
        try:
            while True:
                try:
                    async with asyncio.timeout(None if self._users else CLIENT_IDLE):
                        await self._changed.wait()
                except TimeoutError:
                    if not self._users:
                        return
                self._changed.clear()
        finally:
            self._forget()
            await self.sdk.close()


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, _Client]] = WeakKeyDictionary()


async def _borrow(access: tuple[str | None, str | None, str | None]) -> _Client:
    """This loop's client; `release` it when done. Raises DaytonaAuthenticationError without credentials."""
    if "daytona._async.daytona" not in sys.modules:
        await asyncio.to_thread(_load)
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    # The SDK reads what is missing from the environment, once.
    place = (*access, *(os.environ.get(f"DAYTONA_{name}") for name in ("API_KEY", "API_URL", "TARGET")))
    client = clients.get(place)
    if client is None:
        client = clients[place] = _Client(access, lambda: clients.pop(place, None))
    return client.borrow()


# ---------------------------------------------------------------------------------------------------------------- calls


def _said(error: BaseException) -> str:
    """The provider's own words, without what the SDK puts before them."""
    text = " ".join(str(error).split())
    return re.sub(r"^(Fail(ed|ure) [a-z ]+: )+", "", text)[:1000] or type(error).__name__


def _text(state: Any) -> str:
    return str(getattr(state, "value", state))


def _transient(error: Exception) -> bool:
    """Whether the same call may well succeed in a moment."""
    sdk, status = _sdk(), getattr(error, "status_code", None)
    if isinstance(error, sdk.DaytonaConnectionError):
        return True
    if status is None:  # what never was an answer; a client's own complaint is one of the named types
        return isinstance(error, sdk.DaytonaTimeoutError) or type(error) is sdk.DaytonaError
    return status == 429 or status >= 500 or status == 408


def _unreachable(error: BaseException) -> bool:
    """Whether no connection could be made, so that nothing was sent."""
    import aiohttp

    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def _retry_after(error: BaseException) -> float | None:
    """The seconds that a refusal asks for. Its header's name may end with that of the limit."""
    headers: dict[str, Any] = getattr(error, "headers", None) or {}
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            try:
                return max(0.0, float(value))
            except ValueError:
                continue
    return None


def _pause(attempt: int, error: Exception) -> float:
    """Seconds before the next attempt, the first being number 0."""
    asked = _retry_after(error) or 0.0
    return max(min(asked, LONGEST_WAIT), min(0.1 * 2**attempt, 2.0)) * random.uniform(1.0, 1.5)


async def _again(call: Callable[[], Awaitable[T]], tries: int | None = None) -> T:
    """Makes a call that may be made twice, and makes it again where it was lost. Raises the last DaytonaError."""
    attempt = 0
    while True:
        try:
            return await call()
        except _sdk().DaytonaError as error:
            attempt += 1
            if attempt >= (tries or TRIES) or not _transient(error):
                raise
            await asyncio.sleep(_pause(attempt - 1, error))


async def _find(client: _Client, name: str, looks: int, tries: int | None = None) -> AsyncSandbox | None:
    """The sandbox of that name or id, looked for several times where a call that creates it may be under way."""
    for look in range(looks):
        if look:
            await asyncio.sleep(0.5 * 2 ** (look - 1))
        try:
            return await _again(lambda: client.sdk.get(name, CALL_SECONDS), tries)
        except _sdk().DaytonaNotFoundError:
            continue
    return None


async def _delete(client: _Client, name: str) -> None:
    """Removes the sandbox of that name or id. That it has gone is success. Raises DaytonaError."""
    remote = await _find(client, name, looks=1)
    if remote is not None:
        await _delete_found(remote)


async def _delete_found(remote: AsyncSandbox, wait: bool = False) -> None:
    """Removes it; with `wait`, returns when it has gone, for until then it counts at the provider."""
    for attempt in range(TRIES):
        try:
            await remote.delete(CALL_SECONDS, wait)
            return
        except _sdk().DaytonaNotFoundError:
            return
        except _sdk().DaytonaError as error:
            # A conflict: its state is just changing, and it cannot be removed meanwhile.
            if attempt + 1 == TRIES or not (_transient(error) or isinstance(error, _sdk().DaytonaConflictError)):
                raise
            await asyncio.sleep(_pause(attempt, error))


async def _remove_named(client: _Client, name: str, looks: int, wait: bool) -> None:
    """Removes what a failed creation may have left; what cannot be removed now goes when its lifetime ends."""
    try:
        remote = await _find(client, name, looks)
        if remote is not None:
            await _delete_found(remote, wait)
    except _sdk().DaytonaError as error:
        log.warning("sandbox %s could not be removed, and ends with its lifetime: %s", name, _said(error))


async def _abandon(client: _Client, creating: asyncio.Future[AsyncSandbox], name: str, wait: bool) -> None:
    """Removes the sandbox of a creation that nobody waits for any more, as soon as it can be seen."""
    pause = 0.05
    while True:
        over = creating.done()
        try:
            remote = await _find(client, name, looks=1)
            if remote is not None:
                await _delete_found(remote, wait)
                break
        except _sdk().DaytonaError as error:
            log.warning("sandbox %s could not be removed, and ends with its lifetime: %s", name, _said(error))
            break
        if over:
            break
        await asyncio.wait((creating,), timeout=pause)
        pause = min(2 * pause, 2.0)
    creating.cancel()
    await asyncio.wait((creating,))
    if not creating.cancelled():
        creating.exception()


# ------------------------------------------------------------------------------------------------------------ sandboxes


class DaytonaBox(Sandbox):
    """One sandbox of Daytona."""

    provider = "daytona"
    isolation = "daytona"
    layers = ()
    python = "python3"

    def __init__(self, block: DaytonaSandbox, client: _Client, remote: AsyncSandbox) -> None:
        self.id = remote.id
        self.settings = DriverSettings(
            cwd=".",  # where its command starts
            volume=block.volume_mount_path if block.volume_name is not None else None,
            environment={name: value.get_secret_value() for name, value in block.environment.items()},
            lifetime=block.lifetime,
            files=FILES,
        )
        self._block = block
        self._client = client
        self._remote = remote
        self._directory = ""  # of the clone, below the sandbox's own
        self._channel: DaytonaChannel | None = None
        self._awake: asyncio.Task[None] | None = None
        self._removed = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> DaytonaChannel:
        """Gives a channel whose first frame starts the driver; see `Sandbox.connect`."""
        self._channel = DaytonaChannel(self, self._remote, receive, closed)
        return self._channel

    async def launch(self, header: dict[str, Any], body: bytes) -> tuple[str, str]:
        """Starts the driver with its first frame; returns its session and command. Raises SandboxStartError."""
        files = [_sdk().FileUpload(data, f"{FILES}/{name}") for name, data in _driver_files().items()]
        try:
            started = await self._start(files, header, body)
        except _sdk().DaytonaError as error:
            raise SandboxStartError(f"the driver did not start in sandbox {self.id}: {_said(error)}") from error
        self._awake = asyncio.create_task(self._stay_awake())
        return started

    async def _session(self) -> str:
        name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
        try:
            await _again(lambda: self._remote.process.create_session(name, CALL_SECONDS))
        except _sdk().DaytonaConflictError:
            pass  # a call whose answer was lost has made it
        return name

    async def _start(self, files: list[Any], header: dict[str, Any], body: bytes) -> tuple[str, str]:
        """Uploads the files and the first frame's body, and starts the driver; returns its session and its command.

        A start that was lost on its way is made anew in a session of its own, for in the old one it would wait for the
        first to end, and with a body of its own, for the first takes the one that it was given. What this leaves is a
        driver that nobody speaks to.
        """
        session = command = ""
        for attempt in range(TRIES):
            if not command:
                place = f"{FILES}/in.0.{attempt}"
                uploads = [*files, _sdk().FileUpload(body, place)] if not attempt else [_sdk().FileUpload(body, place)]
                # Together: neither needs the other.
                session, _ = await asyncio.gather(
                    self._session(),
                    _again(functools.partial(self._remote.fs.upload_files, uploads, int(CALL_SECONDS))),
                )
                first = driver.encode({**header, "file": place}).decode()
                command = f"{self.python} -u -c {shlex.quote(BOOT)} {shlex.quote(first)}"
                if self._directory:
                    command = f"cd {shlex.quote(self._directory)} && {command}"
            request = _sdk().SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
            try:
                answer = await self._remote.process.execute_session_command(session, request, int(CALL_SECONDS))
                return session, answer.cmd_id
            except _sdk().DaytonaError as error:
                if attempt + 1 == TRIES or not _transient(error):
                    raise
                await asyncio.sleep(_pause(attempt, error))
                if getattr(error, "status_code", None) != 429:
                    command = ""
        raise AssertionError

    async def run(self, command: str, seconds: float) -> tuple[int, str]:
        """Runs a shell command to its end; returns its status and what it wrote. Raises TimeoutError, DaytonaError.

        It is asked for its status, not waited for in one call: a proxy ends a call that takes minutes. Nothing is
        tried again but the asking.
        """
        process = self._remote.process
        session = await self._session()
        request = _sdk().SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
        started = await process.execute_session_command(session, request, int(CALL_SECONDS))
        pause = 0.05
        async with asyncio.timeout(seconds):
            while True:
                found = await _again(lambda: process.get_session_command(session, started.cmd_id, CALL_SECONDS))
                if found.exit_code is not None:
                    break
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, 2.0)
        said = await _again(lambda: process.get_session_command_logs(session, started.cmd_id, CALL_SECONDS))
        return found.exit_code, "\n".join(filter(None, (said.stdout, said.stderr)))

    async def clone(self, commit: str) -> None:
        """Clones the repository and checks the commit out. Raises ConfigurationError, SandboxStartError, DaytonaError.

        The daemon signs in with the token; nothing in the clone, the environment or a command line has it.
        """
        block, sdk = self._block, _sdk()
        assert block.repo_url is not None
        path = re.sub(r"[^A-Za-z0-9._-]", "-", Path(urlsplit(block.repo_url).path).stem) or "repository"
        token = block.repo_token.get_secret_value() if block.repo_token is not None else None
        signed: dict[str, Any] = {"username": "x-access-token", "password": token} if token else {}
        ref = block.repo_ref
        # It clones one branch. A name may be a branch's or a tag's, and a tag is found on the default branch.
        branches = [None] if ref is None or repository.COMMIT_PATTERN.fullmatch(ref) else [ref, None]
        try:
            for branch in branches:
                try:
                    await self._remote.git.clone(
                        block.repo_url, path, branch=branch, commit_id=commit, request_timeout=SETUP_SECONDS, **signed
                    )
                    break
                except sdk.DaytonaError as error:
                    refused = isinstance(error, sdk.DaytonaAuthenticationError) or GONE.search(_said(error))
                    if branch is None or refused or _transient(error):
                        raise
        except sdk.DaytonaError as error:
            if _transient(error) or GONE.search(_said(error)):
                raise
            raise ConfigurationError(
                f"the repository {block.repo_url} could not be cloned at {commit} in a sandbox ({_said(error)}): check "
                "repo_url, repo_ref and repo_token, and that Daytona can reach it"
            ) from error
        self._directory = path

    async def install(self, packages: list[str]) -> None:
        """Installs packages. Raises ConfigurationError, SandboxStartError or DaytonaError, with pip's last lines."""
        words = " ".join(shlex.quote(package) for package in packages)
        command = f"python3 -m pip install --quiet --disable-pip-version-check --no-input -- {words}"
        try:
            status, said = await self.run(command, SETUP_SECONDS)
        except TimeoutError:
            raise SandboxStartError(f"pip did not end within {SETUP_SECONDS:.0f} s in sandbox {self.id}") from None
        if status:
            lines = [line for line in said.splitlines() if line.strip()]
            text = f"pip could not install {', '.join(packages)} (status {status}): " + "\n".join(lines[-10:])
            # The one sign that pip gives of a network that is away: it says that it tries again.
            lost = "Retrying (" in said
            raise SandboxStartError(text) if lost else ConfigurationError(f"{text}\nChange packages, or the image")

    async def _stay_awake(self) -> None:
        """Tells Daytona that the sandbox is in use: code may wait for an answer longer than one may be idle."""
        while True:
            await asyncio.sleep(STAY_AWAKE)
            try:
                await _again(lambda: self._remote.refresh_activity(CALL_SECONDS))
            except _sdk().DaytonaError as error:
                log.debug("sandbox %s could not be kept awake: %s", self.id, _said(error))

    def last_words(self) -> str:
        """The end of what the driver has written on standard error."""
        return self._channel.words if self._channel is not None else ""

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file; see `Sandbox.upload`."""
        place = self._place(path)
        try:
            await _again(lambda: self._remote.fs.upload_file(data, place, int(SETUP_SECONDS)))
        except _sdk().DaytonaError as error:
            raise self._file_error(error, path, "written") from error

    async def download(self, path: str) -> bytes:
        """A file's bytes; see `Sandbox.download`."""
        place = self._place(path)
        try:
            return await _again(lambda: self._remote.fs.download_file(place, int(SETUP_SECONDS))) or b""
        except _sdk().DaytonaError as error:
            raise self._file_error(error, path, "read") from error

    def _place(self, path: str) -> str:
        if not path or "\0" in path:
            raise VolumeError(f"{path!r} is no path of a file")
        return path if path.startswith("/") or not self._directory else f"{self._directory}/{path}"

    def _file_error(self, error: Exception, path: str, how: str) -> RlmBatchError:
        status = getattr(error, "status_code", None)
        if GONE.search(_said(error)) or _transient(error) or status in (401, 403):
            return SandboxLost(f"{path} could not be {how}, for sandbox {self.id} does not answer: {_said(error)}")
        return VolumeError(f"{path} could not be {how}: {_said(error)}")

    async def remove(self) -> None:
        """Removes the sandbox, with all that runs in it."""
        if self._removed:
            return
        self._removed = True
        try:
            if self._awake is not None:
                self._awake.cancel()
            if self._channel is not None:
                await self._channel.close()
            await _delete_found(self._remote, self._block.counted)
        except _sdk().DaytonaError as error:
            log.warning("sandbox %s could not be removed, and ends with its lifetime: %s", self.id, _said(error))
        finally:
            self._client.release()


@functools.cache
def _driver_files() -> dict[str, bytes]:
    """The driver's text, and compiled for a Python such as ours: in a sandbox that has another the text is compiled."""
    spec = importlib.util.find_spec(driver.__name__)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_bytes()
    code = marshal.dumps(compile(text, f"{FILES}/{MODULE}.py", "exec", dont_inherit=True))
    # A pyc that is taken without a look at its source (PEP 552): the two come from here together.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(text)
    return {f"{MODULE}.py": text, f"__pycache__/{MODULE}.{sys.implementation.cache_tag}.pyc": head + code}


class DaytonaChannel:
    """The wire to a driver that runs as a session's command: its log is followed, and it is sent input.

    The log comes again from its beginning whenever its connection was cut, and an input whose answer was lost is sent
    again: either side passes over frames that it has had.
    """

    def __init__(
        self,
        box: DaytonaBox,
        remote: AsyncSandbox,
        receive: Callable[[bytes], None],
        closed: Callable[[str], None],
    ) -> None:
        self._box = box
        self._remote = remote
        self._command = ("", "")  # session and id, once the driver has been started
        self._receive = receive
        self._closed = closed
        self._frames = driver.Frames()
        self._broken = False
        self._heard = 0
        self._gone = ""
        self._queue: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._waiting = asyncio.Event()
        self._body_number = 0
        self.words = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, data: bytes) -> None:
        """Hands the bytes over, after those of earlier sends. Raises SandboxLost where the driver cannot have them.

        Where it may have them and nothing more can be heard of it, the channel is closed and nothing is raised. The
        first starts the driver, and raises SandboxStartError where it does not start.
        """
        if self._gone:
            raise self._lost()
        if not self._tasks:
            self._command = await self._box.launch(*_cut(data))
            self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._send_all())]
            for task in self._tasks:
                # One may be cancelled by somebody else: a loop that ends cancels all that there is, and who waits here
                # for a send would wait for ever.
                task.add_done_callback(lambda _: self._end("what carries its frames has been cancelled"))
            return
        done = asyncio.get_running_loop().create_future()
        self._queue.append((data, done))
        self._waiting.set()
        await done

    async def close(self) -> None:
        """Stops following the log and sending."""
        self._gone = self._gone or "it was shut down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._refuse_queue()

    def _end(self, reason: str) -> None:
        if not self._gone:
            self._gone = reason
            self._closed(reason)
            self._refuse_queue()

    def _refuse_queue(self) -> None:
        while self._queue:
            _, done = self._queue.popleft()
            if not done.done():
                done.set_exception(self._lost())

    def _lost(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self._box.id} has gone ({self._gone}): run the code in a new one")

    # -- to the driver

    async def _send_all(self) -> None:
        while not self._gone:
            await self._waiting.wait()
            self._waiting.clear()
            while self._queue and not self._gone:
                frames, taken, size = [], [], 0
                while self._queue and (not frames or size + len(self._queue[0][0]) <= INPUT_LIMIT):
                    data, done = self._queue.popleft()
                    taken.append(done)
                    try:
                        data = await self._small(data)
                    except _sdk().DaytonaError as error:
                        self._settle(taken, error, delivered=False)
                        return
                    frames.append(data)
                    size += len(data)
                # Whoever takes the input adds the newline that is missing.
                if not await self._post(b"".join(frames)[:-1].decode("utf-8"), taken):
                    return

    async def _small(self, data: bytes) -> bytes:
        """A frame as it is, or, where it is large, one that names a file with its body."""
        if len(data) <= INPUT_LIMIT:
            return data
        header, body = _cut(data)
        self._body_number += 1
        header["file"] = f"{FILES}/in.{self._body_number}"
        await _again(lambda: self._remote.fs.upload_file(body, header["file"], int(SETUP_SECONDS)))
        return driver.encode(header)

    async def _post(self, text: str, taken: list[asyncio.Future[None]]) -> bool:
        """Sends one input; again where it was lost, for the driver passes over what it has had."""
        session, command = self._command
        begun, attempt, delivered = asyncio.get_running_loop().time(), 0, False
        while True:
            try:
                await self._remote.process.send_session_command_input(session, command, text, CALL_SECONDS)
            except asyncio.CancelledError:
                self._settle(taken, None, delivered=True)
                raise
            except _sdk().DaytonaError as error:
                delivered = delivered or getattr(error, "status_code", None) not in (400, 401, 403, 404, 410, 429)
                late = asyncio.get_running_loop().time() > begun + GIVE_UP
                if late or self._gone or not _transient(error):
                    if getattr(error, "status_code", None) == 410:  # the log's end says more
                        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS)
                    self._settle(taken, error, delivered)
                    return False
                await asyncio.sleep(_pause(attempt, error))
                attempt += 1
            else:
                for done in taken:
                    if not done.done():
                        done.set_result(None)
                return True

    def _settle(self, taken: list[asyncio.Future[None]], error: Exception | None, delivered: bool) -> None:
        """The end of an input that cannot be sent, which may have arrived nonetheless."""
        self._end(f"it takes no input: {_said(error)}" if error is not None else "it was shut down")
        for done in taken:
            if done.done():
                continue
            if delivered:
                done.set_result(None)
            else:
                done.set_exception(self._lost())

    # -- from the driver

    async def _follow(self) -> None:
        session, command = self._command
        process, loop = self._remote.process, asyncio.get_running_loop()
        attempt, heard, well = 0, 0, loop.time()
        while True:
            self._frames, self._broken = driver.Frames(), False  # the log begins anew
            failure: Exception | None = None
            try:
                await process.get_session_command_logs_async(session, command, self._on_stdout, self._on_stderr)
            except _sdk().DaytonaError as error:
                failure = error
                if isinstance(error.__cause__, driver.BadFrame):
                    self._end(f"it sent what is no frame ({error.__cause__})")
                    return
            if self._heard > heard:
                attempt, heard, well = 0, self._heard, loop.time()
            try:
                found = await _again(lambda: process.get_session_command(session, command, CALL_SECONDS))
            except _sdk().DaytonaError as error:
                if not _transient(error):
                    self._end(f"Daytona says: {_said(error)}")
                    return
                failure = error
            else:
                if found.exit_code is not None and failure is None:
                    words = f": {self.words.strip()}" if self.words.strip() else ""
                    self._end(f"its process has ended with status {found.exit_code}{words}")
                    return
            if loop.time() > well + GIVE_UP:
                self._end(f"its log cannot be followed: {_said(failure) if failure else 'it ends again and again'}")
                return
            await asyncio.sleep(_pause(attempt, failure or Exception()) if attempt else 0.0)
            attempt += 1

    async def _on_stdout(self, text: str) -> None:
        if self._broken:  # the SDK hands over what it still holds, markers and all, when this has raised
            return
        self._broken = True
        await self._take(text)
        self._broken = False

    async def _take(self, text: str) -> None:
        for header, body in self._frames.feed(text.encode("utf-8")):
            if header["n"] <= self._heard:
                continue
            path = header.pop("file", None)
            if path is not None:
                body = await self._fetch(path)
            self._heard = header["n"]
            self._receive(driver.encode(header, body))

    async def _fetch(self, path: str) -> bytes:
        """A body that was too large for the log."""
        body = await _again(lambda: self._remote.fs.download_file(path, int(SETUP_SECONDS)))
        try:
            await _again(lambda: self._remote.fs.delete_file(path, False, CALL_SECONDS))
        except _sdk().DaytonaError as error:  # a call whose answer was lost may have removed it; the body is here
            log.debug("%s was not removed from sandbox %s: %s", path, self._box.id, _said(error))
        return body or b""

    async def _on_stderr(self, text: str) -> None:
        self.words = (self.words + text)[-2000:]


def _cut(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A frame's header, which says nothing of its body any more, and the body."""
    ((header, body),) = driver.Frames().feed(data)
    header.pop("body", None)
    return header, body or b""
