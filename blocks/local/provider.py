"""The local provider: opens sandboxes on this machine, at the level of isolation that works here, and lists them."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, ClassVar

from ...sandbox import confinement
from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError
from ...sandbox.interpreter import Interpreter
from ..provider import SandboxInfo, SandboxProvider
from . import isolation
from .cache import check_out_repository, install_packages
from .creation import create_sandbox
from .handle import LocalSandboxHandle
from .inventory import delete_sandbox, list_sandboxes, pick_folder, remove_folder
from .isolation import INSTALL_HINT, IsolationLevel, list_layers
from .settings import LocalSettings
from .volume import LocalVolume, find_volumes_root

PROBE = """
try:
    open({secret!r}).read()
    seen = True
except OSError:
    seen = False
SUBMIT(seen=seen)
"""
_reasons: dict[IsolationLevel, str] = {}  # why a level does not work here, of those tried; empty if it does


class LocalProvider(LocalSettings, SandboxProvider):
    """Opens, lists and removes sandboxes on this machine."""

    provider_name: ClassVar[str] = "local"
    gradual: ClassVar[bool] = False

    async def open(self, labels: dict[str, str]) -> LocalSandboxHandle:
        """Opens a sandbox. Raises ConfigurationError where this machine cannot isolate, SandboxStartError otherwise."""
        level = await self.resolve_isolation()
        packages = await install_packages(self.packages) if self.packages else None
        if self.repo_url is None:
            return create_sandbox(self, level, labels, packages)
        clone = await check_out_repository(self.repo_url, await self.commit() or "", self.repo_token)
        sandbox = create_sandbox(self, level, labels, packages)
        try:
            await sandbox.copy_repository(clone)
        except BaseException:
            await run_shielded(sandbox.remove())
            raise
        return sandbox

    async def resolve_isolation(self) -> IsolationLevel:
        """The level of isolation that is in force. Raises ConfigurationError with the fix where there is none."""
        if self.isolation == "none":
            return self.isolation
        if self.isolation != "auto":
            if reason := await probe_level(self.isolation):
                raise ConfigurationError(
                    f"isolation {self.isolation!r} does not work on this machine: {reason}. {INSTALL_HINT}"
                )
            return self.isolation
        reasons: list[str] = []
        for level in ("bubblewrap", "landlock"):
            reason = await probe_level(level)
            if not reason:
                return level
            reasons.append(f"{level}: {reason}")
        raise ConfigurationError(f"this machine cannot isolate local sandboxes ({'; '.join(reasons)}). {INSTALL_HINT}")

    async def check(self) -> str:
        """The level of isolation in force, and its layers."""
        level = await self.resolve_isolation()
        return f"{level} ({', '.join(list_layers(level)) or 'the code can do what you can'})"

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The local sandboxes of this user and this temporary directory."""
        return list_sandboxes()

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Ends the sandbox's processes and removes its folder."""
        await delete_sandbox(sandbox_id)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings and the Python's version: limits decide whether there is a result, and not which."""
        settings = {**await super().fingerprint(), "python": sys.version.split()[0]}
        if self.volume_name is not None:  # the same name elsewhere is another volume
            settings["volume"] += [str(find_volumes_root(self.volume_root))]
        return settings

    async def open_volume(self, name: str) -> LocalVolume:
        """The directory of that name below the root."""
        return LocalVolume(find_volumes_root(self.volume_root), name)


async def probe_level(level: IsolationLevel) -> str:
    """Why a level does not work here, empty if it does: found out once in a process, by running code under it."""
    if level not in _reasons:
        _reasons[level] = _find_missing_support(level) or await try_level(level)
    return _reasons[level]


def _find_missing_support(level: IsolationLevel) -> str:
    """What of a level this machine lacks, as far as it can be known without a try."""
    if sys.platform != "linux":
        return f"local isolation needs Linux (WSL2 included), and this is {sys.platform}"
    if confinement.find_architecture() is None:
        return f"there is no system call filter for {os.uname().machine}: x86_64 and aarch64 have one"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    if level == "landlock" and not isolation.find_landlock_abi():
        return "this kernel offers no Landlock"
    return ""


async def try_level(level: IsolationLevel) -> str:
    """Opens a sandbox and asks code in it to read a file that it must not see; returns why the level does not work."""
    # In a folder that is named as a sandbox's is: should this process be killed, it is found as one.
    folder = pick_folder()
    secret = folder / "secret"
    try:
        folder.mkdir()
        folder.chmod(0o755)
        secret.touch()
        secret.chmod(0o644)
    except OSError as error:
        remove_folder(folder)
        raise ConfigurationError(
            f"no sandbox can be made in {folder.parent}: {error.strerror}. Name another directory in TMPDIR"
        ) from error

    async def open_sandbox() -> LocalSandboxHandle:
        return create_sandbox(LocalSettings(isolation=level), level, {"managed-by": "rlm-batch"})

    interpreter = Interpreter(open_sandbox, timeout=20.0)
    try:
        result = await interpreter.execute(PROBE.format(secret=str(secret)))
        return "code in it could read a file that it must not see" if result["seen"] else ""
    except RlmBatchError as error:
        return error.summary
    finally:
        await interpreter.shutdown()
        secret.unlink()
        folder.rmdir()
