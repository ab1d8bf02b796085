"""Sandboxes of Modal: the provider's settings, and its adapter to Modal's own client.

The client is imported when it is first needed: that takes 0.6 s. Its calls are made by their `.aio` form throughout,
for the plain ones would block the loop. What was read in the client, release 1.6, and is relied upon:
- the standard input of a command loses what is written while it drains: one lock around both;
- a command cannot be ended but by its own deadline or with its sandbox, and its arguments are 64 KiB at most;
- a call that is refused with a time to wait is tried again for ever unless MODAL_MAX_THROTTLE_WAIT is set.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import os
import random
import uuid
import weakref
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, SecretStr

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
from ..storage.safe_paths import split_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    import modal

T = TypeVar("T")

PYTHON = "3.12"  # of the default image; without a version it would be that of the host
THROTTLE_SECONDS = 60  # for which a refused call is tried again, unless MODAL_MAX_THROTTLE_WAIT says otherwise
CREATE_SECONDS = 600.0  # for the answer to a creation: Modal may be looking for a machine
SEND_SECONDS = 90.0  # for the driver to take a piece of its input: as long as it may be silent
RELOAD_SECONDS = 60
CLONE_SECONDS = 600
PIECE = 4 * 1024 * 1024  # bytes of input at a time; the client takes 16 MiB at most
DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds between attempts at what has to be done in the end
READ_SECONDS = 5.0  # for the last words of a driver that has ended
LABEL = {"managed-by": "rlm-batch"}

log = logging.getLogger(__name__)

# Takes the driver from standard input, ahead of the first frame, and becomes it: compiled, where this Python is one
# like the host's (which saves some 25 ms), and else as text. What waited for a driver that never comes would keep
# its sandbox from being idle, so it ends itself.
BOOT = """
import marshal, os, signal, sys, zlib
from _frozen_importlib_external import MAGIC_NUMBER

signal.alarm(120)

def take(rest):
    data = []
    while rest:
        data.append(os.read(0, rest))
        rest -= len(data[-1]) or os._exit(0)
    return zlib.decompress(b"".join(data))

code, text = take({code}), take({text})
signal.alarm(0)
os.makedirs({workdir!r}, exist_ok=True)
sys.path[:] = [path for path in sys.path if path]
found = {{"__name__": "driver"}}
exec(marshal.loads(code) if MAGIC_NUMBER == {magic!r} else compile(text, "driver", "exec"), found)
found["main"]()
"""

CLONE = """
set -e
mkdir -p "$1"
cd "$1"
git init -q
git remote add origin "$2"
git fetch -q --depth 1 origin "$3" || git fetch -q origin "+refs/heads/*:refs/remotes/origin/*" --tags
git checkout -q --detach "$3"
"""

INSTALL_GIT = "command -v git || (apt-get update && apt-get install -y --no-install-recommends git)"


class ModalSandbox(SandboxProvider, Block):
    """Sandboxes of Modal, which need an account.

    Without `token_id` and `token_secret` it signs in as Modal's own client does: with MODAL_TOKEN_ID and
    MODAL_TOKEN_SECRET, or what `modal token new` has saved.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import ModalSandbox

        sandbox = ModalSandbox.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str] = "Modal Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "modal-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = "Runs code in sandboxes of Modal."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://modal.com/docs/guide/sandbox")  # type: ignore[misc]
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]
    provider_name: ClassVar[str] = "modal"

    token_id: SecretStr | None = Field(
        default=None, title="Token id", description="Of an API token; by default that of Modal's own configuration."
    )
    token_secret: SecretStr | None = Field(
        default=None, title="Token secret", description="It belongs to the token id."
    )
    app_name: str = Field(
        default="rlm-batch",
        title="App",
        pattern=r"^[A-Za-z0-9._-]{1,63}$",
        description="The Modal app that sandboxes belong to, made when it is first asked for.",
    )
    image: str | None = Field(
        default=None,
        title="Image",
        description="A public image with Python 3.9 or newer as `python`, such as python:3.13-slim; by default Debian "
        f"with Python {PYTHON}.",
    )
    cpu: float | None = Field(
        default=None, gt=0, title="CPU", description="Cores that a sandbox has at least; by default Modal's, an eighth."
    )
    memory_mib: int | None = Field(
        default=None,
        ge=128,
        title="Memory",
        description="MiB that a sandbox has, and at most; each process of the code may address as much. By default it "
        "has Modal's, and no limit of its own.",
    )
    gpu: str | None = Field(default=None, title="GPU", description="A kind of GPU, such as T4 or H100:2.")
    region: str | None = Field(default=None, title="Region", description="Where sandboxes run, such as us-east or eu.")
    block_network: bool = Field(default=False, title="Block network", description="Code has no network at all.")
    allowed_domains: list[str] | None = Field(
        default=None,
        title="Allowed domains",
        description="The only names that code may connect to; *.example.org covers all below it.",
    )
    allowed_cidrs: list[str] | None = Field(
        default=None, title="Allowed addresses", description="The only address ranges that code may connect to."
    )
    workdir: str = Field(
        default="/sandbox",
        title="Directory",
        pattern="^/.",
        description="Where the code runs, and where the repository is cloned to.",
    )
    lifetime: int = Field(
        default=14_400,
        ge=10,
        le=86_400,
        title="Lifetime",
        description="Seconds after which Modal itself ends a sandbox, whatever became of its host: longer than any of "
        "its executions, and 24 hours at most.",
    )
    idle_timeout: int = Field(
        default=60,
        ge=1,
        title="Idle timeout",
        description="Seconds after which Modal ends a sandbox whose driver has ended, as it does 90 s after its host "
        "fell silent.",
    )

    def has_credentials(self) -> bool:
        """Whether it has a token, or Modal's own configuration has."""
        if self.token_id is not None and self.token_secret is not None:
            return True
        from modal.config import config

        return bool(config.get("token_id") and config.get("token_secret")) or bool(
            os.environ.get("MODAL_OAUTH_REFRESH_TOKEN")
        )

    async def open(self, labels: dict[str, str]) -> ModalBox:
        """Opens a sandbox, with the repository in it; see `SandboxProvider.open`."""
        account, image, volume = await self._account(), await self._image(), await self._volume()
        commit = await self.commit()
        creating = asyncio.ensure_future(self._create(account, image, volume, labels))
        try:
            sandbox = await asyncio.shield(creating)
        except asyncio.CancelledError:
            await run_shielded(_discard(creating, self.has_sandbox_limit))
            raise
        box = ModalBox(sandbox, self._settings(), self.lifetime, self.has_sandbox_limit)
        if commit is not None:
            try:
                await self._clone(sandbox, commit)
            except BaseException:
                await run_shielded(box.remove())
                raise
        return box

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes of the app that carry our labels."""
        import modal

        account = await self._account()
        found: list[SandboxInfo] = []
        try:
            async for sandbox in modal.Sandbox.list.aio(app_id=account.app.app_id, tags=LABEL, client=account.client):
                with suppress(modal.exception.NotFoundError):  # it has ended meanwhile
                    found.append(SandboxInfo(sandbox.object_id, await sandbox.get_tags.aio()))
        except modal.exception.Error as error:
            raise _mapped(error, "sandboxes could not be listed") from error
        return found

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Terminates the sandbox."""
        import modal

        account = await self._account()
        try:
            await _end(await modal.Sandbox.from_id.aio(sandbox_id, client=account.client), strict=True)
        except modal.exception.NotFoundError:
            pass
        except modal.exception.Error as error:
            raise _mapped(error, f"sandbox {sandbox_id} could not be removed") from error

    async def check(self) -> str:
        """That the token is good; which app sandboxes belong to."""
        account = await self._account()
        return f"Modal's own sandboxes, of its app {self.app_name} ({account.app.app_id})"

    async def open_volume(self, name: str) -> SandboxVolume:
        """The volume of that name, reached from a sandbox."""
        return SandboxVolume(self, name)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings, the image, the resources and the network."""
        found = {**await super().fingerprint(), "image": self.image or f"debian, python {PYTHON}"}
        for name in ("cpu", "memory_mib", "gpu", "block_network", "allowed_domains", "allowed_cidrs"):
            if value := getattr(self, name):
                found[name] = value
        return found

    def _settings(self) -> DriverSettings:
        limits = {"CORE": 0} if self.memory_mib is None else {"CORE": 0, "AS": self.memory_mib * 1024 * 1024}
        volume = None if self.volume_name is None else self.volume_mount_path
        return DriverSettings(
            cwd=self.workdir,
            volume=volume,
            environment={name: value.get_secret_value() for name, value in self.environment.items()},
            lifetime=self.lifetime,
            confinement={"limits": limits},
            commit=[] if volume is None else ["sync", volume],
        )

    # -- what is made once for the process

    async def _account(self) -> Account:
        """The client and the app. Raises what `open` raises."""
        id_, secret = self.token_id, self.token_secret
        token = None if id_ is None or secret is None else (id_.get_secret_value(), secret.get_secret_value())

        async def make() -> Account:
            import modal
            from modal.config import config

            if config.get("max_throttle_wait") is None:
                os.environ["MODAL_MAX_THROTTLE_WAIT"] = str(THROTTLE_SECONDS)
            # It logs every header of every call, the token among them, where a program logs all that there is.
            logging.getLogger("hpack").setLevel(logging.WARNING)
            found = token or (config.get("token_id"), config.get("token_secret"))
            try:
                if all(found):
                    client = await modal.Client.from_credentials.aio(*found)
                else:  # it knows other ways to sign in, and says what is missing; it is one for the whole process
                    client = await modal.Client.from_env.aio()
                app = await modal.App.lookup.aio(self.app_name, create_if_missing=True, client=client)
            except modal.exception.Error as error:
                raise _mapped(error, "signing in to Modal failed") from error
            return Account(client, app)

        return await _once(("account", *self._where()), make)

    async def _image(self) -> modal.Image:
        """The image, built with its packages. Raises what `open` raises."""

        async def make() -> modal.Image:
            import modal

            account = await self._account()
            try:
                if self.image is None:
                    image = modal.Image.debian_slim(python_version=PYTHON)
                else:
                    image = modal.Image.from_registry(self.image)
                if self.packages:
                    image = image.pip_install(*self.packages)
                if self.repo_url is not None:
                    image = image.run_commands(INSTALL_GIT)
                return await image.build.aio(account.app)
            except modal.exception.ImageBuildError as error:
                raise ConfigurationError(
                    f"the image could not be built: {_last_line(error)}; mend `image` or `packages` of the block "
                    f"(its log: modal image logs {getattr(error, 'image_id', 'IMAGE_ID')})"
                ) from error
            except modal.exception.Error as error:
                raise _mapped(error, "the image could not be had") from error

        what = (self.image, tuple(self.packages), self.repo_url is not None)
        return await _once(("image", *self._where(), *what), make)

    async def _volume(self) -> modal.Volume | None:
        """The volume, of version 2: only there does `sync` commit. Raises what `open` raises."""
        name = self.volume_name
        if name is None:
            return None

        async def make() -> modal.Volume:
            import modal

            account = await self._account()
            volume = modal.Volume.from_name(name, create_if_missing=True, version=2, client=account.client)
            try:
                await volume.hydrate.aio()
            except modal.exception.InvalidError as error:
                raise ConfigurationError(
                    f"the volume {name} cannot be used: {_last_line(error)} Name another with volume_name, or copy its "
                    "files to one that is made new"
                ) from error
            except modal.exception.Error as error:
                raise _mapped(error, f"the volume {name} could not be had") from error
            return volume

        return await _once(("volume", *self._where(), name), make)

    def _where(self) -> tuple[Hashable, ...]:
        """Whose handles they are: Modal's client reads the rest of its configuration from the environment."""
        token = self.token_id, self.token_secret
        secrets = tuple(None if value is None else value.get_secret_value() for value in token)
        names = ("SERVER_URL", "TOKEN_ID", "TOKEN_SECRET", "PROFILE", "ENVIRONMENT")
        return (*secrets, self.app_name, *(os.environ.get(f"MODAL_{name}") for name in names))

    # -- one sandbox

    async def _create(
        self, account: Account, image: modal.Image, volume: modal.Volume | None, labels: dict[str, str]
    ) -> modal.Sandbox:
        import modal

        name = f"rlm-batch-{uuid.uuid4().hex[:20]}"
        memory = self.memory_mib
        try:
            async with asyncio.timeout(CREATE_SECONDS):
                return await modal.Sandbox.create.aio(
                    *("sleep", str(self.lifetime)),
                    app=account.app,
                    name=name,
                    tags={key: value for key, value in labels.items() if value},
                    image=image,
                    timeout=self.lifetime,
                    idle_timeout=self.idle_timeout,
                    cpu=self.cpu,
                    memory=None if memory is None else (memory, memory),
                    gpu=self.gpu,
                    region=self.region,
                    block_network=self.block_network,
                    outbound_cidr_allowlist=self.allowed_cidrs,
                    outbound_domain_allowlist=self.allowed_domains,
                    volumes={} if volume is None else {self.volume_mount_path: volume},
                    client=account.client,
                )
        except TimeoutError:
            await self._discard_named(account, name)
            raise SandboxStartError(f"Modal did not open a sandbox within {CREATE_SECONDS:.0f} s") from None
        except (ValueError, TypeError) as error:  # of the client, before it sends anything
            raise ConfigurationError(
                f"no sandbox could be opened: Modal's client does not take the block's settings ({_last_line(error)}); "
                "change its resources or its network"
            ) from error
        except modal.exception.ResourceExhaustedError as error:
            # Its client tries again by itself: what is refused may be a second try, whose first has opened one.
            await self._discard_named(account, name)
            raise _mapped(error, "Modal opens no sandbox for now") from error
        except modal.exception.Error as error:
            if isinstance(error, modal.exception.NotFoundError):
                _forget(self._where())  # the image or the volume has been removed since
                raise SandboxStartError(f"Modal has lost what a sandbox is made of: {_last_line(error)}") from error
            if not isinstance(error, (modal.exception.InvalidError, modal.exception.AuthError)):
                await self._discard_named(account, name)
            raise _mapped(error, "no sandbox could be opened") from error

    async def _discard_named(self, account: Account, name: str) -> None:
        """Ends a sandbox that may have been made although the answer to its creation did not come."""
        import modal

        for delay in (*DELAYS, None):
            try:
                sandbox = await modal.Sandbox.from_name.aio(self.app_name, name, client=account.client)
            except modal.exception.NotFoundError:
                return
            except modal.exception.Error as error:
                if delay is None:
                    log.warning(
                        "Modal did not say whether it opened sandbox %s (%s); if it did, it ends it after %s s at most",
                        *(name, _last_line(error), self.idle_timeout),
                    )
                    return
                await asyncio.sleep(delay)
            else:
                await _end(sandbox, wait=self.has_sandbox_limit)
                return

    async def _clone(self, sandbox: modal.Sandbox, commit: str) -> None:
        """Clones the repository. The token is in the environment of git alone, which has ended when code runs."""
        import modal

        assert self.repo_url is not None
        words = ("sh", "-c", CLONE, "clone", self.workdir, self.repo_url, commit)
        environment: dict[str, str | None] = {
            "GIT_TERMINAL_PROMPT": "0",
            **repository.build_sign_in_environment(self.repo_token),
        }
        try:
            process = await _patient(
                lambda: sandbox.exec.aio(*words, text=False, env=environment, timeout=CLONE_SECONDS)
            )
            status = await _patient(process.wait.aio)
            if status == 0:
                return
            said = (await process.stderr.read.aio()).decode("utf-8", "replace").strip()[-1000:]
        except modal.exception.Error as error:
            raise _mapped(error, f"{self.repo_url} could not be cloned") from error
        raise SandboxStartError(
            f"{self.repo_url} could not be cloned in the sandbox: {said or f'git ended with status {status}'}"
        )


@dataclass(frozen=True)
class Account:
    """A client that has signed in, and its app."""

    client: modal.Client
    app: modal.App


# ------------------------------------------------------------------------------------------------------------ sandboxes


class ModalChannel:
    """The driver's standard input."""

    def __init__(self, box: ModalBox, stdin: Any, closed: Callable[[str], None]) -> None:
        self._box = box
        self._stdin = stdin
        self._closed = closed
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Hands the bytes over, after those of earlier sends. Raises SandboxLost if none of them were sent."""
        await run_shielded(self._send(data))  # half a frame would be the end of the wire

    async def _send(self, data: bytes) -> None:
        import modal

        async with self._lock:
            if self._box.gone:
                raise SandboxLost(f"sandbox {self._box.id} had gone ({self._box.gone}): run it in a new one")
            try:
                for start in range(0, len(data), PIECE):
                    async with asyncio.timeout(SEND_SECONDS):
                        self._stdin.write(data[start : start + PIECE])
                        await _patient(self._stdin.drain.aio)
            except (modal.exception.Error, TimeoutError) as error:
                # The driver may have had all of it: so the wire is closed, and what was sent has an unknown outcome.
                await self._box.heard_out()
                if not self._box.gone:
                    self._box.gone = f"it took no input: {_last_line(error) or type(error).__name__}"
                    self._closed(self._box.gone)


class ModalBox(Sandbox):
    """One sandbox of Modal."""

    provider = "modal"
    isolation = "modal"
    layers = ()

    def __init__(self, sandbox: modal.Sandbox, settings: DriverSettings, lifetime: int, counted: bool) -> None:
        self.id = sandbox.object_id
        self.settings = settings
        self.gone = ""  # why nothing more can be said to the driver
        self._sandbox = sandbox
        self._lifetime = lifetime
        self._counted = counted
        self._reading: asyncio.Task[None] | None = None
        self._removed = False

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> ModalChannel:
        """Starts the driver; see `Sandbox.connect`."""
        import modal

        code, text = _driver()
        boot = BOOT.format(code=len(code), text=len(text), magic=MAGIC_NUMBER, workdir=self.settings.cwd)
        try:
            process: Any = await _patient(
                lambda: self._sandbox.exec.aio("python", "-u", "-c", boot, text=False, timeout=self._lifetime)
            )
        except modal.exception.Error as error:
            raise _mapped(error, f"the driver did not start in sandbox {self.id}") from error
        process.stdin.write(code + text)  # it goes with the first frame
        self._reading = asyncio.create_task(self._read(process, receive, closed))
        return ModalChannel(self, process.stdin, closed)

    async def _read(self, process: Any, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> None:
        import modal

        reason = "its process has ended"
        try:
            await self._read_all(process.stdout, receive)
            with suppress(modal.exception.Error, TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    words = (await process.stderr.read.aio())[-2000:].decode("utf-8", "replace").strip()
                    reason = f"{reason}: {words}" if words else reason
        except modal.exception.NotFoundError:
            reason = "Modal has ended it"
        except modal.exception.TimeoutError:
            reason = f"its lifetime of {self._lifetime} s is over"
        except Exception as error:  # noqa: BLE001 - whatever broke it, there is no more to read
            reason = f"its output broke off: {type(error).__name__}: {_last_line(error)}"
        self.gone = self.gone or reason
        closed(reason)

    async def _read_all(self, stdout: Any, receive: Callable[[bytes], None]) -> None:
        """Reads to the end. A stream that breaks off is taken up where it was: the client knows how far it has come."""
        import modal

        loop = asyncio.get_running_loop()
        heard, delay = loop.time(), 0.1
        while True:
            try:
                async for data in stdout:
                    heard, delay = loop.time(), 0.1
                    receive(data)
                return
            except (
                modal.exception.ResourceExhaustedError,
                modal.exception.ServiceError,
                modal.exception.InternalError,
                modal.exception.ConnectionError,
            ):
                if loop.time() + delay > heard + THROTTLE_SECONDS:
                    raise
                await asyncio.sleep(delay)
                delay = min(2 * delay, 5.0)

    async def heard_out(self) -> None:
        """Waits a moment for a driver that has ended to say why."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=READ_SECONDS)

    async def refresh_volume(self) -> None:
        """Reloads the volume; see `Sandbox.refresh_volume`. It cannot be while code holds a file of it open."""
        import modal

        if self.settings.volume is None or self.gone:
            return
        try:
            await _patient(lambda: self._sandbox.reload_volumes.aio(timeout=RELOAD_SECONDS))
        except modal.exception.ConflictError as error:
            log.warning(
                "sandbox %s could not reload its volume (%s): code sees it as it was", self.id, _last_line(error)
            )
        except modal.exception.Error as error:
            raise SandboxLost(
                f"sandbox {self.id} did not reload its volume before the code was sent: {_last_line(error)}"
            ) from error

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file; see `Sandbox.upload`."""
        with _file_errors(self.id, f"{path} could not be written"):
            await _patient(lambda: self._sandbox.filesystem.write_bytes.aio(data, self._place(path)))

    async def download(self, path: str) -> bytes:
        """A file's bytes; see `Sandbox.download`."""
        with _file_errors(self.id, f"{path} could not be read"):
            return await _patient(lambda: self._sandbox.filesystem.read_bytes.aio(self._place(path)))

    def _place(self, path: str) -> str:
        if path.startswith("/"):
            return path
        return str(PurePosixPath(self.settings.cwd, *split_path(path)))

    async def remove(self) -> None:
        """Terminates the sandbox, and closes the connection to it."""
        if self._removed:
            return
        self._removed = True
        self.gone = self.gone or "it was removed"
        if self._reading is not None:
            self._reading.cancel()
        await _end(self._sandbox, wait=self._counted)


class _file_errors:
    """Turns the client's errors about files into ours."""

    def __init__(self, sandbox: str, what: str) -> None:
        self._sandbox = sandbox
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        import modal

        if isinstance(error, modal.exception.SandboxFilesystemError):
            raise VolumeError(f"{self._what}: {_last_line(error)}") from error
        if isinstance(error, modal.exception.Error):
            raise SandboxLost(f"{self._what}, for sandbox {self._sandbox} has gone: {_last_line(error)}") from error


@cache
def _driver() -> tuple[bytes, bytes]:
    """The driver, compiled for this Python and as text, each compressed."""
    assert driver.__file__ is not None
    text = Path(driver.__file__).read_bytes()
    code = marshal.dumps(compile(text, "driver", "exec", dont_inherit=True))
    return zlib.compress(code), zlib.compress(text)


async def _discard(creating: asyncio.Future[modal.Sandbox], wait: bool) -> None:
    """Waits for a creation that nobody wants any more, and ends what it made."""
    try:
        sandbox = await creating
    except RlmBatchError:
        return
    await _end(sandbox, wait=wait)


async def _end(sandbox: modal.Sandbox, *, strict: bool = False, wait: bool = False) -> None:
    """Terminates it and lets go of the connection. What Modal does not do now, it does at the end of its lifetime.

    With `wait` it returns when the sandbox has ended, for until then it counts.
    """
    import modal

    try:
        for delay in (*DELAYS, None):
            try:
                await (sandbox.terminate.aio(wait=True) if wait else sandbox.terminate.aio())
                break
            except modal.exception.NotFoundError:
                break
            except (modal.exception.AuthError, modal.exception.Error) as error:
                if delay is None:
                    if strict:
                        raise
                    log.warning("sandbox %s was not removed: %s", sandbox.object_id, _last_line(error))
                    break
                await asyncio.sleep(delay)
    finally:
        with suppress(Exception):
            await sandbox.detach.aio()  # otherwise its socket stays for half a minute


async def _patient(call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call that may be made again, and does so while it is refused, for a bounded time."""
    import modal
    from modal.config import config

    until = asyncio.get_running_loop().time() + float(config.get("max_throttle_wait") or 0)
    delay = 0.1
    while True:
        try:
            return await call()
        except modal.exception.ResourceExhaustedError:
            wait = delay * random.uniform(1.0, 1.5)
            if asyncio.get_running_loop().time() + wait > until:
                raise
            await asyncio.sleep(wait)
            delay = min(2 * delay, 5.0)


# --------------------------------------------------------------------------------------------------------------- errors


def _mapped(error: Exception, what: str) -> RlmBatchError:
    """Our error for one of the client's. What was created has been removed."""
    import modal

    reason = _last_line(error)
    kinds = modal.exception
    if isinstance(error, kinds.ResourceExhaustedError):
        details = getattr(error, "_grpc_details", None) or ()
        waits = [entry.retry_after_secs for entry in details if hasattr(entry, "retry_after_secs")]
        asked = f", and asks for {waits[0]:.1f} s more" if waits else ""
        limit = os.environ.get("MODAL_MAX_THROTTLE_WAIT", THROTTLE_SECONDS)
        return QuotaExceeded(
            f"{what}: {reason} It was tried for {limit} s{asked}: use fewer workers, or ask Modal for a higher limit"
            if waits
            else f"{what}: {reason} Use fewer workers, or ask Modal for a higher limit",
            retry_after=waits[0] if waits else None,
        )
    if isinstance(error, (kinds.AuthError, kinds.PermissionDeniedError)):
        return ConfigurationError(
            f"{what}: {reason} Set token_id and token_secret of the block, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, "
            "or run `modal token new`"
        )
    if isinstance(error, kinds.ConflictError):
        return SandboxStartError(f"{what}: {reason}")
    if isinstance(error, (kinds.InvalidError, kinds.VersionError, kinds.UnimplementedError)):
        return ConfigurationError(f"{what}: {reason}")
    return SandboxStartError(f"{what}: {reason}")


def _last_line(error: BaseException) -> str:
    """What an error says, in one line: of the many of a failed build the last is the complaint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__


# ---------------------------------------------------------------------------------------------- made once for a process

_made: dict[Hashable, Any] = {}
_making: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_making = weakref.WeakKeyDictionary()


async def _once(key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
    """What `make` makes, made once for a key; who asks meanwhile waits for it, and may be cancelled alone."""
    if key in _made:
        return _made[key]
    making = _making.setdefault(asyncio.get_running_loop(), {})
    task = making.get(key)
    if task is None:

        async def run() -> T:
            try:
                _made[key] = await make()
                return _made[key]
            finally:
                del making[key]

        task = making[key] = asyncio.create_task(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it
    return await asyncio.shield(task)


def _forget(where: tuple[Hashable, ...]) -> None:
    """Drops images and volumes, which others may have removed."""
    for key in list(_made):
        if isinstance(key, tuple) and key[0] != "account" and key[1 : 1 + len(where)] == where:
            del _made[key]
