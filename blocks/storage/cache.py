"""What this machine keeps for its local sandboxes: clones of repositories, and packages that were installed."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...sandbox.errors import ConfigurationError
from ..git import git

if TYPE_CHECKING:
    from pydantic import SecretStr

FETCH_SECONDS = 600.0  # for a repository of some gigabytes
INSTALL_SECONDS = 900.0


def cache_root() -> Path:
    """`RLM_BATCH_CACHE`, or the user's cache directory. What is below it is made again when it is missing."""
    given = os.environ.get("RLM_BATCH_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "rlm-batch"


async def checkout(url: str, commit: str, token: SecretStr | None) -> Path:
    """A clone of the repository with that commit checked out, fetched once. Raises ConfigurationError."""

    async def fetch(folder: Path) -> None:
        inside = ("-C", str(folder))
        await git(*inside, "init", "--quiet")
        try:
            await git(
                *inside, "fetch", "--quiet", "--depth", "1", "--", url, commit, token=token, seconds=FETCH_SECONDS
            )
        except ConfigurationError:
            # Some servers hand out only what a branch or a tag names: all of those, then.
            refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
            await git(*inside, "fetch", "--quiet", "--", url, *refs, token=token, seconds=FETCH_SECONDS)
        await git(*inside, "checkout", "--quiet", "--detach", commit, seconds=FETCH_SECONDS)
        (folder / ".git" / "FETCH_HEAD").unlink(missing_ok=True)  # it has the address, with what stands in it

    name = hashlib.sha256(url.encode()).hexdigest()[:24]
    return await _made(cache_root() / "repositories" / name / commit, fetch)


async def packages(requirements: list[str]) -> Path:
    """A directory with the packages and what they need, for this very Python, installed once.

    Only from wheels: to build a package is to run its code on the host. Raises ConfigurationError.
    """

    async def install(folder: Path) -> None:
        await _run(*_installer(), "--only-binary", ":all:", "--target", str(folder), "--", *sorted(requirements))
        await _run("chmod", "-R", "a+rX", str(folder))  # code that runs as a user of its own reads them

    parts = [sys.version, platform.machine(), *sorted(requirements)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return await _made(cache_root() / "packages" / name, install)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if shutil.which("uv") is not None:
        return ["uv", "pip", "install", "--quiet", "--python", sys.executable]
    raise ConfigurationError(f"packages need pip or uv: install one of them beside {sys.executable}")


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the terminal is the flow's to handle
    )
    try:
        async with asyncio.timeout(INSTALL_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        raise ConfigurationError(f"the packages were not installed within {INSTALL_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines()[-10:]
        raise ConfigurationError("the packages could not be installed: " + "\n".join(lines))


async def _made(folder: Path, make: Callable[[Path], Awaitable[None]]) -> Path:
    """`folder`, made by whoever asks first, in this process or another; the others wait for it."""
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(folder.name + ".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.1)
            if not folder.exists():
                half = Path(tempfile.mkdtemp(dir=folder.parent, prefix="half-"))
                try:
                    half.chmod(0o755)
                    await make(half)
                    half.rename(folder)
                finally:
                    shutil.rmtree(half, ignore_errors=True)
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigurationError(
            f"nothing could be kept in {folder.parent} ({error.strerror}): name another place in RLM_BATCH_CACHE"
        ) from error
    return folder
