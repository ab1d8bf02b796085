"""Sandboxes on this machine: the local provider's settings, and how it starts one on each rung of isolation."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.abc
import json
import marshal
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl

from ...sandbox import confinement, driver
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxLost, SandboxStartError, VolumeError
from ...sandbox.interpreter import Interpreter
from ...sandbox.provider_api import DriverSettings, Sandbox
from ..provider import SandboxInfo, SandboxProvider
from ..storage.safe_paths import read_file_below, write_file_below
from ..subprocess_runner import run_command
from .cache import check_out_repository, install_packages
from .volume import UMASK, LocalVolume, volumes_root

if TYPE_CHECKING:
    from collections.abc import Callable

Rung = Literal["bubblewrap", "landlock", "none"]

PACKAGES = "/packages"  # where a bubblewrap sandbox has what was installed for it
PREFIX = "rlm-batch-"  # of a sandbox's folder, which is named after its id
NAME = re.compile(PREFIX + "[0-9a-f]{12}")
LABELS = "sandbox.json"  # in the folder: its labels, in a file that its host holds locked for as long as it lives
MAKING_SECONDS = 60.0  # after which a folder that has no such file is nobody's: a live host takes a moment for both
READ_SIZE = 64 * 1024  # bytes; a larger buffer would be mapped anew for each read
WIRE_SIZE = 256 * 1024  # bytes of pipe; a user has 64 MiB of it before the kernel makes all new pipes narrow
END_GRACE = 5.0  # seconds for the driver to end what runs, before it is ended itself
FIRST_UID = 0x5A000000  # of the users that code runs as where the host is root: far from those that systems hand out
FIX = (
    "install bubblewrap (apt install bubblewrap, dnf install bubblewrap), or use Linux 5.13 or newer with Landlock; "
    "isolation='none' (provider local:none) runs the code with no isolation at all"
)


class LocalSandbox(SandboxProvider, Block):
    """Sandboxes on this machine, which need no account.

    Code runs in processes of its own with no network, none of the host's environment, the system's files read only,
    one folder that it may write, and limits on memory, processes, file sizes and time. It shares the kernel: a kernel
    bug breaks this. It is for code that is wrong, not for an attacker who is determined.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import LocalSandbox

        sandbox = LocalSandbox.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str] = "Local Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "local-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = "Runs code in isolated processes on this machine, with no account."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://github.com/containers/bubblewrap")  # type: ignore[misc]
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]
    provider_name: ClassVar[str] = "local"
    gradual: ClassVar[bool] = False

    isolation: Literal["auto", "bubblewrap", "landlock", "none"] = Field(
        default="auto",
        title="Isolation",
        description="auto takes the strongest that works here: bubblewrap, then landlock, and refuses where neither "
        "does. none runs code with no isolation.",
    )
    memory_mib: int = Field(
        default=4096,
        ge=64,
        title="Memory",
        description="MiB of address space for each process of the code; numerical libraries want a few thousand.",
    )
    processes: int = Field(
        default=128, ge=1, title="Processes", description="Processes and threads that the code may have at one time."
    )
    file_size_mib: int = Field(
        default=1024, ge=1, title="File size", description="MiB that one file written by the code may have."
    )
    cpu_seconds: int | None = Field(
        default=None,
        ge=1,
        title="CPU seconds",
        description="CPU seconds for each process of the code; unlimited by default, for the timeout ends it anyway.",
    )

    volume_root: str | None = Field(
        default=None,
        title="Volumes",
        description="The directory that local volumes are in; by default RLM_BATCH_VOLUMES, or one below the user's "
        "data directory.",
    )

    async def open(self, labels: dict[str, str]) -> LocalBox:
        """Opens a sandbox. Raises ConfigurationError where this machine cannot isolate, SandboxStartError otherwise."""
        rung = await self.rung()
        packages = await install_packages(self.packages) if self.packages else None
        if self.repo_url is None:
            return _make(self, rung, labels, packages)
        clone = await check_out_repository(self.repo_url, await self.commit() or "", self.repo_token)
        box = _make(self, rung, labels, packages)
        try:
            await box.fill(clone)
        except BaseException:
            await run_shielded(box.remove())
            raise
        return box

    async def rung(self) -> Rung:
        """The level of isolation that is in force. Raises ConfigurationError with the fix where there is none."""
        if self.isolation != "auto":
            if self.isolation != "none":
                await _require(self.isolation)
            return self.isolation
        reasons: list[str] = []
        for rung in ("bubblewrap", "landlock"):
            reason = await _probe(rung)
            if not reason:
                return rung
            reasons.append(f"{rung}: {reason}")
        raise ConfigurationError(f"this machine cannot isolate local sandboxes ({'; '.join(reasons)}). {FIX}")

    async def check(self) -> str:
        """The level in force and what it is made of."""
        rung = await self.rung()
        return f"{rung} ({', '.join(_layers(rung))})" if rung != "none" else "none (the code can do what you can)"

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The local sandboxes of this user and this temporary directory."""
        folders = filter(_ours, Path(tempfile.gettempdir()).glob(PREFIX + "*"))
        return [info for info in map(_info, folders) if info is not None]

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Ends the sandbox's processes and removes its folder."""
        folder = Path(tempfile.gettempdir()) / sandbox_id
        if not sandbox_id.startswith(PREFIX) or "/" in sandbox_id:
            raise ConfigurationError(f"{sandbox_id!r} is no id of a local sandbox: they begin with {PREFIX}")
        if not _ours(folder):
            return  # it has gone, or somebody else has put something there
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in _processes_of(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            for _ in range(int(END_GRACE / 0.05)):
                if not _processes_of(folder):
                    break
                await asyncio.sleep(0.05)
        await asyncio.to_thread(_remove_folder, folder)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings and the Python: what code may use up decides whether there is a result, not which."""
        found = {**await super().fingerprint(), "python": sys.version.split()[0]}
        if self.volume_name is not None:
            found["volume"] += [str(volumes_root(self.volume_root))]  # the same name elsewhere is another volume
        return found

    async def open_volume(self, name: str) -> LocalVolume:
        """The directory of that name below the root."""
        return LocalVolume(volumes_root(self.volume_root), name)


# ------------------------------------------------------------------------------------------------------------ sandboxes


class LocalChannel:
    """The driver's standard input, written without blocking the loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Hands the bytes over, after those of earlier sends. Raises SandboxLost."""
        async with self._lock:
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    await run_shielded(self._send_rest(rest))  # half a frame would be the end of the wire
                    return
                except OSError:
                    raise SandboxLost("the sandbox's process has ended: run it in a new one") from None

    async def _send_rest(self, rest: memoryview) -> None:
        while rest:
            await self._writable()
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                raise SandboxLost("the sandbox's process has ended: run it in a new one") from None

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_writer(self._fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_writer(self._fd)


class LocalBox(Sandbox):
    """One local sandbox: a folder, and the processes of its driver."""

    provider = "local"

    def __init__(
        self,
        folder: Path,
        rung: Rung,
        settings: DriverSettings,
        command: list[str],
        cwd: str,
        volume: LocalVolume | None,
        held: int,
    ) -> None:
        self.id = folder.name
        self.isolation = rung
        self.layers = _layers(rung)
        self.settings = settings
        self._folder = folder
        self._command = command
        self._cwd = cwd
        self._volume = volume
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._held = held  # the locked file of the labels
        # A program that ends without shutting down leaves no folder either; the processes end with the wire.
        self._left = weakref.finalize(self, _leave, folder, held)

    async def fill(self, clone: Path) -> None:
        """Copies the clone to where the code runs. Raises SandboxStartError."""
        work = self._folder / "work"
        commands = [["cp", "-r", "--preserve=mode,timestamps,links", "--reflink=auto", "--", f"{clone}/.", str(work)]]
        if os.geteuid() == 0:
            owner = work.stat()
            commands.append(["chown", "-R", "-h", f"{owner.st_uid}:{owner.st_gid}", "--", str(work)])
        for command in commands:
            done = await run_command(*command)
            if done.returncode:
                raise SandboxStartError(f"the repository could not be copied into the sandbox: {done.stderr.strip()}")

    async def connect(self, receive: Callable[[bytes], None], closed: Callable[[str], None]) -> LocalChannel:
        """Starts the driver; see `Sandbox.connect`."""
        reads, writes = self._launch()
        loop = asyncio.get_running_loop()

        def on_output() -> None:
            try:
                data = os.read(reads, READ_SIZE)
            except BlockingIOError:
                return
            if data:
                receive(data)
                return
            loop.remove_reader(reads)
            words = self.last_words()
            closed(f"its process has ended: {words}" if words else "its process has ended")

        loop.add_reader(reads, on_output)
        channel = LocalChannel(writes)
        await self._send_driver(channel)
        return channel

    async def attach(self) -> tuple[int, int]:
        """Starts the driver; see `Sandbox.attach`."""
        reads, writes = self._launch()
        await self._send_driver(LocalChannel(writes))
        return reads, writes

    async def _send_driver(self, channel: LocalChannel) -> None:
        try:
            await channel.send(_driver_code())
        except SandboxLost:
            words = self.last_words() or "its process ended at once"
            raise SandboxStartError(f"the driver did not start in sandbox {self.id}: {words}") from None

    def _launch(self) -> tuple[int, int]:
        # On this thread and no other: a parent-death signal comes when the thread that started a process ends.
        try:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._cwd,
                env={},
                bufsize=0,
                start_new_session=True,  # Ctrl-C in the terminal is the host's to handle
            )
        except OSError as error:
            raise SandboxStartError(f"{self._command[0]} could not be started: {error.strerror}. {FIX}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        driver.widen(process.stdin.fileno(), WIRE_SIZE)
        return process.stdout.fileno(), process.stdin.fileno()

    def last_words(self) -> str:
        """The end of what came on the standard error of the driver, or of bubblewrap."""
        process = self._process
        if process is None or process.stderr is None:
            return ""
        with suppress(OSError, ValueError):
            self._said += os.read(process.stderr.fileno(), READ_SIZE)
        return self._said[-2000:].decode("utf-8", "replace").strip()

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file; see `Sandbox.upload`."""
        on_volume = self._on_volume(path)
        if on_volume is not None:
            await on_volume[0].put(on_volume[1], data)
        else:
            await asyncio.to_thread(write_file_below, *self._place(path), data)

    async def download(self, path: str) -> bytes:
        """A file's bytes; see `Sandbox.download`."""
        on_volume = self._on_volume(path)
        if on_volume is not None:
            return await on_volume[0].get(on_volume[1])
        return await asyncio.to_thread(read_file_below, *self._place(path))

    def _on_volume(self, path: str) -> tuple[LocalVolume, str] | None:
        """The volume, and the path on it, if that is where a path of the code's leads."""
        mount = self.settings.volume
        if self._volume is None or mount is None or not PurePosixPath(path).is_relative_to(mount):
            return None
        return self._volume, str(PurePosixPath(path).relative_to(mount))

    def _place(self, path: str) -> tuple[Path, str]:
        """Where a path of the code's is on the host: a directory, and the path below it."""
        settings = self.settings
        places = {settings.cwd: self._folder / "work", settings.environment["TMPDIR"]: self._folder / "tmp"}
        for inside, outside in places.items():
            if PurePosixPath(path).is_relative_to(inside):
                return outside, str(PurePosixPath(path).relative_to(inside))
        if path.startswith("/"):
            raise VolumeError(f"{path} is in no directory that the code may write: {', '.join(places)}")
        return self._folder / "work", path

    async def remove(self) -> None:
        """Closes the wire, upon which the driver ends everything; ends the driver itself if it does not."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdout is not None:
                asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            for number in (signal.SIGTERM, signal.SIGKILL):
                if await _ended(process, END_GRACE):
                    break
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            else:
                await _ended(process, END_GRACE)
        if not _remove_empty(self._folder):
            await asyncio.to_thread(_remove_folder, self._folder)
        if self._left.detach() is not None:
            os.close(self._held)


async def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends within that time; reaps it."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        for _ in range(int(seconds / 0.01)):
            await asyncio.sleep(0.01)
            if process.poll() is not None:
                return True
        return False
    loop.add_reader(handle, lambda: gone.done() or gone.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await gone
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.poll() is not None


def _ours(folder: Path) -> bool:
    """Whether it is a directory that this user has made, in a place where others may make some too."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _info(folder: Path) -> SandboxInfo | None:
    """What is known of the sandbox in a folder, None where it is going, or not ours."""
    try:
        handle = os.open(folder / LABELS, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Its host was killed while it made the folder or removed it: the name alone says whose it is.
        with suppress(OSError):
            if NAME.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > MAKING_SECONDS:
                return SandboxInfo(folder.name, {"managed-by": "rlm-batch"}, abandoned=True)
        return None
    except OSError:
        return None
    try:
        with open(handle, encoding="utf-8") as file:
            labels = json.loads(file.read())["labels"]
            return SandboxInfo(folder.name, {str(key): str(value) for key, value in labels.items()}, not _locked(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _locked(file: IO[str]) -> bool:
    """Whether somebody holds the file: the kernel lets go of it for a process that has died, however it did."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _hold(folder: Path, labels: dict[str, str]) -> int:
    """Writes the labels, and returns the file, which is locked before anybody can see it by its name."""
    hidden = folder / f"{LABELS}.new"
    handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, json.dumps({"labels": labels}).encode())
        hidden.rename(folder / LABELS)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _leave(folder: Path, held: int) -> None:
    _remove_folder(folder)
    os.close(held)


def _processes_of(folder: Path) -> list[int]:
    """The drivers (and bubblewraps) of a sandbox: what has its folder in its command line or as its directory."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                here = os.readlink(f"/proc/{name}/cwd") == str(folder / "work")
                if here or os.fsencode(folder / "work") in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def _remove_empty(folder: Path) -> bool:
    """Removes the folder of a sandbox whose code has left no files, the common case, without a thread."""
    try:
        for name in ("work", "tmp"):
            (folder / name).rmdir()
        (folder / LABELS).unlink()
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _remove_folder(folder: Path) -> None:
    """Removes it whatever the code has made of it: trees of any depth, directories closed to their own user."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


# ------------------------------------------------------------------------------------------------------------ isolation


def _python() -> str:
    """This Python's own executable, not a virtual environment's: the code sees the standard library."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _driver_code() -> bytes:
    """The driver, compiled for this very Python, which is the sandbox's too: it starts some 20 ms sooner than text."""
    loader = getattr(driver.__spec__, "loader", None)
    assert isinstance(loader, importlib.abc.InspectLoader)
    return marshal.dumps(loader.get_code(driver.__name__))


def _boot(rung: Rung) -> str:
    """A program that takes the driver from standard input, ahead of the first frame, and becomes it."""
    # In a process namespace nothing outlives the first process; elsewhere that takes somebody who watches.
    watched = rung != "bubblewrap"
    return (
        f"import marshal, os\nrest = {len(_driver_code())}\ndata = []\n"
        "while rest:\n    data.append(os.read(0, rest))\n    rest -= len(data[-1]) or os._exit(0)\n"
        "driver = {'__name__': 'driver'}\nexec(marshal.loads(b''.join(data)), driver)\n"
        f"driver['main'](watched={watched})"
    )


@cache
def _abi() -> int:
    return confinement.probe_landlock_abi()


def _layers(rung: Rung) -> tuple[str, ...]:
    if rung == "none":
        return ()
    layers = [f"landlock-{_abi()}"] if _abi() else []
    layers += ["seccomp"] if confinement.find_architecture() else []
    layers += ["user"] if os.geteuid() == 0 else []
    return (*(["namespaces"] if rung == "bubblewrap" else []), *layers, "limits")


def _closed_to_others(path: str) -> bool:
    """Whether another user is kept out of a directory by the mode of one of its parents."""
    return any(not os.stat(parent).st_mode & 0o001 for parent in (path, *map(str, Path(path).parents)))


def _tasks_of_user() -> int:
    """Processes and threads that this user has now: the kernel counts them all against RLIMIT_NPROC."""
    total, me = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{name}").st_uid == me:
                    total += int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[17])
    return total


def _prefixes() -> list[str]:
    """Directories of this Python's installation that lie outside of the system's."""
    found = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix))
    return [path for path in found if not path.startswith(("/usr/", "/bin/", "/lib/")) and path not in ("/usr", "/")]


def _make(block: LocalSandbox, rung: Rung, labels: dict[str, str], packages: Path | None = None) -> LocalBox:
    """The folder of a new sandbox, and the command that starts its driver."""
    volume, gid, mount = None, None, None
    if block.volume_name is not None:
        volume = LocalVolume(volumes_root(block.volume_root), block.volume_name)
        gid = volume.make()
        mount = _mount_point(block.volume_mount_path) if rung == "bubblewrap" else os.path.realpath(volume.path)
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex[:12]}"
    root = os.geteuid() == 0 and rung != "none"
    uid = FIRST_UID + int.from_bytes(os.urandom(3), "big") if root else None
    held: int | None = None
    try:
        folder.mkdir(mode=0o700)
        (folder / "work").mkdir(mode=0o755)
        (folder / "tmp").mkdir(mode=0o755)
        held = _hold(folder, labels)
        if uid is not None:
            # The code may go through the folder itself, and no more than that.
            os.chown(folder, 0, uid)
            folder.chmod(0o710)
            for path in (folder / "work", folder / "tmp"):
                os.chown(path, uid, uid)
    except OSError as error:
        _remove_folder(folder)
        if held is not None:
            os.close(held)
        raise SandboxStartError(
            f"no folder for a sandbox could be made in {folder.parent}: {error.strerror}"
        ) from error
    work, tmp = ("/sandbox", "/tmp") if rung == "bubblewrap" else (str(folder / "work"), str(folder / "tmp"))
    installed = None if packages is None else PACKAGES if rung == "bubblewrap" else str(packages)
    programs = [os.path.dirname(_python()), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": ":".join([*programs, f"{installed}/bin"] if installed else programs),
        "HOME": work,
        "TMPDIR": tmp,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: value.get_secret_value() for name, value in block.environment.items()},
    }
    settings = DriverSettings(
        cwd=work,
        volume=mount,
        environment=environment,
        path=[installed] if installed else [],
        heartbeat=None,  # the wire's end is enough on one machine
        lifetime=block.lifetime,
        confinement=_confinement(block, rung, uid, (work, tmp), mount, installed),
    )
    if gid is not None:
        settings.confinement.update(gid=gid, umask=UMASK)
    python = [_python(), "-I", "-S", "-c", _boot(rung)]
    if rung == "bubblewrap":
        mounts = [] if volume is None or mount is None else [("--bind", str(volume.path), mount)]
        if packages is not None:
            mounts.append(("--ro-bind", str(packages), PACKAGES))
        return LocalBox(folder, rung, settings, [*_bubblewrap(folder, mounts), *python], "/", volume, held)
    return LocalBox(folder, rung, settings, python, work, volume, held)


def _mount_point(path: str) -> str:
    """Where a volume is mounted. Raises ConfigurationError for a place that the sandbox needs for itself."""
    place = PurePosixPath(os.path.normpath("/" + path.lstrip("/")))
    taken = [PurePosixPath(path) for path in (*confinement.SYSTEM, "/etc", "/proc", "/dev", "/sys", *_prefixes())]
    own = [PurePosixPath("/sandbox"), PurePosixPath("/tmp"), PurePosixPath(PACKAGES)]
    above = any(other.is_relative_to(place) for other in (*taken, *own))
    if above or any(place.is_relative_to(other) for other in taken):
        raise ConfigurationError(
            f"volume_mount_path is {path}, which a local sandbox needs for itself: name another place, such as /data"
        )
    return str(place)


def _confinement(
    block: LocalSandbox,
    rung: Rung,
    uid: int | None,
    own: tuple[str, ...],
    volume: str | None,
    packages: str | None,
) -> dict[str, Any]:
    mib = 1024 * 1024
    limits = {"AS": block.memory_mib * mib, "FSIZE": block.file_size_mib * mib, "CORE": 0}
    if block.cpu_seconds is not None:
        limits["CPU"] = block.cpu_seconds
    if rung == "none":
        return {"limits": limits}
    # In a user namespace the kernel counts for the sandbox alone, and so it does for a user of the sandbox's own.
    alone = rung == "bubblewrap" or uid is not None
    limits["NPROC"] = block.processes + (0 if alone else _tasks_of_user())
    bubblewrap = rung == "bubblewrap"
    writable = own if volume is None else (*own, volume)
    readable = (*_readable(), *([packages] if packages is not None else []))
    policy = confinement.Policy(
        readable=(*readable, "/proc") if bubblewrap else readable,
        writable=(*writable, "/dev/shm") if bubblewrap else writable,
        network=bubblewrap,
        own_mounts=bubblewrap,
        own_uid=uid is not None,
        abi=_abi(),
    )
    found: dict[str, Any] = {"limits": limits, "uid": uid}
    if _abi():
        found["landlock"] = policy.build_landlock_rules()
    machine = confinement.find_architecture()
    if machine is not None:
        found["seccomp"] = _filter(replace(policy, readable=(), writable=()), machine)
    if uid is not None and not bubblewrap:
        # Only the search of directories, and Landlock decides what may be read: an interpreter under /root.
        others = [os.path.dirname(path) for path in (volume, packages) if path is not None]
        ways = [*_prefixes(), tempfile.gettempdir(), *others]
        found["search"] = any(_closed_to_others(path) for path in ways)
    return found


@cache
def _filter(policy: confinement.Policy, machine: str) -> str:
    """The system call filter, which is the same for every sandbox but for its paths, and those are Landlock's."""
    return policy.build_seccomp_filter(machine)


@cache
def _readable() -> tuple[str, ...]:
    paths = [*confinement.SYSTEM, *confinement.ETC, *confinement.KERNEL, *_prefixes()]
    return tuple(path for path in paths if os.path.exists(path))


@cache
def _system_binds() -> tuple[str, ...]:
    """The system's directories. All of /etc, for each mount costs a tenth of a millisecond; Landlock leaves a part."""
    links = [path for path in confinement.SYSTEM if os.path.islink(path)]
    etc = ("/etc",) if _abi() else confinement.ETC
    binds = [path for path in (*confinement.SYSTEM, *etc, *_prefixes()) if path not in links and os.path.exists(path)]
    arguments: list[str] = []
    # bubblewrap makes missing parents for its own user alone, and the code may run as another.
    parents = dict.fromkeys(str(parent) for path in binds for parent in reversed(Path(path).parents))
    for parent in parents:
        if parent != "/" and not any(Path(parent).is_relative_to(bind) for bind in binds):
            arguments += ["--perms", "0755", "--dir", parent]
    for path in links:
        arguments += ["--symlink", os.readlink(path), path]
    for path in binds:
        arguments += ["--ro-bind", path, path]
    return tuple(arguments)


def _bubblewrap(folder: Path, mounts: list[tuple[str, str, str]]) -> list[str]:
    """The command line that everything of a sandbox runs under."""
    root = os.geteuid() == 0
    # Root needs no user namespace, and without one its children can become a user of their own.
    user = [
        "--cap-drop",
        "ALL",
        *(word for cap in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", f"CAP_{cap}")),
    ]
    return [
        shutil.which("bwrap") or "bwrap",
        *(user if root else ["--unshare-user"]),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session"),
        *_system_binds(),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--bind", str(folder / "work"), "/sandbox", "--bind", str(folder / "tmp"), "/tmp"),
        *(word for mount in mounts for word in _bind(*mount)),
        *("--chdir", "/sandbox", "--remount-ro", "/"),
    ]


def _bind(how: str, source: str, target: str) -> list[str]:
    """A directory of the host's, in its place; bubblewrap makes missing parents for its own user alone."""
    above = [str(parent) for parent in reversed(PurePosixPath(target).parents) if str(parent) != "/"]
    return [*(word for parent in above for word in ("--perms", "0755", "--dir", parent)), how, source, target]


# --------------------------------------------------------------------------------------------------------------- probes

PROBE = """
try:
    open({secret!r}).read()
    seen = True
except OSError:
    seen = False
SUBMIT(seen=seen)
"""
_probed: dict[str, str] = {}


async def _require(rung: Rung) -> None:
    reason = await _probe(rung)
    if reason:
        raise ConfigurationError(f"isolation {rung!r} does not work on this machine: {reason}. {FIX}")


async def _probe(rung: Rung) -> str:
    """Why the rung does not work here, empty if it does. Found out once, by running code under it."""
    if rung not in _probed:
        _probed[rung] = _missing(rung) or await _try(rung)
    return _probed[rung]


def _missing(rung: Rung) -> str:
    if sys.platform != "linux":
        return f"local isolation needs Linux (WSL2 included), and this is {sys.platform}"
    if confinement.find_architecture() is None:
        return f"there is no system call filter for {os.uname().machine}: x86_64 and aarch64 have one"
    if rung == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    if rung == "landlock" and not _abi():
        return "this kernel offers no Landlock"
    return ""


async def _try(rung: Rung) -> str:
    """Opens a sandbox and asks code in it to read a file that it must not see."""
    # In a folder that is named as a sandbox's is: should this process be killed, it is found as one.
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex[:12]}"
    secret = folder / "secret"
    try:
        folder.mkdir()
        folder.chmod(0o755)
        secret.touch()
        secret.chmod(0o644)
    except OSError as error:
        _remove_folder(folder)
        raise ConfigurationError(
            f"no sandbox can be made in {folder.parent}: {error.strerror}. Name another directory in TMPDIR"
        ) from error
    interpreter = Interpreter(_opener(rung), timeout=20.0)
    try:
        result = await interpreter.execute(PROBE.format(secret=str(secret)))
        return "code in it could read a file that it must not see" if result["seen"] else ""
    except RlmBatchError as error:
        return error.summary
    finally:
        await interpreter.shutdown()
        secret.unlink()
        folder.rmdir()


def _opener(rung: Rung) -> Callable[[], Any]:
    async def open_probe() -> LocalBox:
        return _make(LocalSandbox(isolation=rung), rung, {"managed-by": "rlm-batch"})

    return open_probe
