"""The cache on this machine for local sandboxes: clones of repositories, and copies of modules."""

import asyncio
import fcntl
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from ...sandbox.errors import ConfigurationError
from ...sandbox.file_lock import try_lock
from ..git import run_git
from ..storage.location import locate_local
from ..subprocess_runner import run_command
from ..worker_consent import check_repository
from .python_path import PythonPath

CACHE_FOLDERS = ("packages/*", "bin/*", "python-path/*", "repositories/*/*", "repository-archives/*/*")
FOLDER_NAME = re.compile("[0-9a-f]{24,64}")  # a digest, or a commit
FETCH_TIMEOUT_SECONDS = 600.0  # seconds, enough for a repository of some gigabytes

_used_folders: dict[Path, int] = {}  # the locked folders that this process has used, and their descriptors


def resolve_cache_root() -> Path:
    """Return the cache's directory: `RLM_BATCH_CACHE`, or one in the user's cache. Deleting its content is safe."""
    named = os.environ.get("RLM_BATCH_CACHE")
    if named:
        return locate_local(named, "RLM_BATCH_CACHE")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "rlm-batch"


async def check_out_repository(url: str, commit: str, token: SecretStr | None) -> Path:
    """Return a cached clone of the repository with that commit checked out. Raises ConfigurationError."""
    check_repository(url)

    async def clone(folder: Path) -> None:
        run_here = partial(run_git, "-C", str(folder))
        run_fetch = partial(run_here, "fetch", "--quiet", token=token, timeout=FETCH_TIMEOUT_SECONDS)
        await run_here("init", "--quiet")
        try:
            await run_fetch("--depth", "1", "--", url, commit)
        except ConfigurationError:
            # Some servers refuse single commits, so fetch all branches and tags. Fetch the branches as remote branches:
            # git does not fetch into a checked-out branch, and a new repository has its first branch checked out.
            await run_fetch("--", url, "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        await run_here("checkout", "--quiet", "--detach", commit, timeout=FETCH_TIMEOUT_SECONDS)
        (folder / ".git" / "FETCH_HEAD").unlink(missing_ok=True)  # The file has the URL, which may contain secrets.

    name = hashlib.sha256(url.encode()).hexdigest()[:24]
    return await make_once(resolve_cache_root() / "repositories" / name / commit, clone)


async def keep_modules(modules: PythonPath) -> str:
    """Return a cached directory that contains the modules. Raises ConfigurationError."""

    async def write(folder: Path) -> None:
        await asyncio.to_thread(modules.write, folder)
        await run_command("chmod", "-R", "a+rX", str(folder))  # Code may run as another user.

    return str(await make_once(resolve_cache_root() / "python-path" / modules.digest[:24], write))


async def make_once(folder: Path, make: Callable[[Path], Awaitable[None]]) -> Path:
    """Return `folder`, which `make` fills for the first caller on this machine.

    Other callers wait for the first. `rlm-batch prune` keeps the folder until this process ends.
    """
    try:
        while not (folder.is_dir() and _mark_used(folder)):
            await _make_missing(folder, make)
    except OSError as error:
        raise ConfigurationError(
            f"{folder.parent} cannot be written ({error.strerror}): set RLM_BATCH_CACHE to another directory"
        ) from error
    return folder


async def _make_missing(folder: Path, make: Callable[[Path], Awaitable[None]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.with_name(folder.name + ".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock(lock):  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(0.1)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="half-", ignore_cleanup_errors=True) as half:
                os.chmod(half, 0o755)
                await make(Path(half))
                os.rename(half, folder)
    finally:
        os.close(lock)


def _mark_used(folder: Path) -> bool:
    """Lock the folder for this process, and set its time of modification to now. Return False if it is missing."""
    if folder in _used_folders:
        if folder.exists():
            return True
        os.close(_used_folders.pop(folder))
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # Some file systems have no locks, and another user's folder keeps its time.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
    _used_folders[folder] = descriptor
    return folder.exists()  # `rlm-batch prune` may have deleted the folder before the lock.


def list_cached_folders() -> Iterator[tuple[Path, float]]:
    """Yield the complete folders of the cache, and when a run last began to use each one, in epoch seconds."""
    for pattern in CACHE_FOLDERS:
        for path in sorted(resolve_cache_root().glob(pattern)):
            with suppress(OSError):
                state = path.lstat()
                if stat.S_ISDIR(state.st_mode) and FOLDER_NAME.fullmatch(path.name):
                    yield path, state.st_mtime
