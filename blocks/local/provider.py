"""The local provider: opens sandboxes on this machine, at the level of isolation that works here, and lists them."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError
from ...sandbox.sandbox_api import Sandbox
from ..host_files.cache import check_out_repository, keep_modules
from ..host_files.mounts import overlaps
from ..provider import SandboxInfo, SandboxProvider
from ..storage.local_volume import LocalVolume, find_volume, find_volumes_root, list_volumes
from .cgroup import find_parent, plan_totals
from .creation import Libraries, create_sandbox
from .deletion import delete_sandbox
from .inventory import list_sandboxes, lock_kept_folder, pick_folder, read_kept_until, read_record
from .isolation import IsolationLevel, check_mount_places, list_layers
from .isolation_level import resolve_level
from .launch.launcher import Launch, zygotes
from .packages import (
    SCRIPTS,
    digest_installed_versions,
    find_environment_packages,
    find_environment_scripts,
    install_packages,
    list_installed_versions,
    locate_packages,
)
from .settings import LocalSettings
from .terminal import run_terminal


class LocalProvider(LocalSettings, SandboxProvider):
    """The provider of sandboxes on this machine."""

    provider_name: ClassVar[str] = "local"
    gradual: ClassVar[bool] = False
    uploads_files: ClassVar[bool] = False
    binds_mounts: ClassVar[bool] = True
    has_this_python: ClassVar[bool] = True

    async def open(self, labels: dict[str, str]) -> Sandbox:
        level, libraries = await self._resolve_isolation()
        clone = None
        if self.repo_url is not None:
            clone = await check_out_repository(self.repo_url, await self.commit() or "", self.repo_token)
        sandbox = create_sandbox(self, level, labels, libraries, self._files.mounts)
        sandbox.clone = clone
        return sandbox

    async def _resolve_isolation(self) -> tuple[IsolationLevel, Libraries]:
        """Return the level of isolation, and the directories that code on this level imports from."""
        level = await resolve_level(self.isolation)
        check_mount_places(self._files.mounts, level)
        packages: list[Path] = []
        scripts = None
        if self.has_environment_packages:
            packages = find_environment_packages()
            scripts = await find_environment_scripts(packages)
        elif self.packages:
            folder = await install_packages(self.packages)
            packages = [folder]
            scripts = folder / SCRIPTS
        modules = self._files.python_path
        if modules is None or level == "none":  # Code of level none could write to shared modules.
            return level, Libraries(packages, scripts, copied_modules=modules)
        directories = modules.list_directories(await keep_modules(modules))
        return level, Libraries(packages, scripts, [Path(path) for path in directories])

    def check_mounts(self) -> None:
        super().check_mounts()
        if self.volume_name is not None:
            volume = os.path.realpath(find_volume(self.volume_root, self.volume_name).path)
            for mount in self._files.mounts:
                if overlaps(str(mount.source), volume):
                    raise ConfigurationError(
                        f"mounts: {mount.source} and the volume {self.volume_name} ({volume}) overlap: "
                        "leave the mount out"
                    )

    async def check(self) -> str:
        """Describe the isolation: level, layers, start of sandboxes and their limits. Raises ConfigurationError."""
        level = await resolve_level(self.isolation)
        check_mount_places(self._files.mounts, level)
        layers = [*list_layers(level), *plan_totals(self, level).layers]
        layers = layers or ["the code can do everything that you can"]
        obstacle = zygotes.find_obstacle(Launch(pick_folder(), is_bubblewrap=level == "bubblewrap"))
        start = f"starts a Python of its own ({obstacle})" if obstacle else "is forked from a zygote"
        controllers = ", ".join(find_parent().controllers)
        totals = f"cgroup v2 ({controllers})" if controllers else "a watcher"
        return f"{level} ({', '.join(layers)}); each sandbox {start}; {totals} limits a sandbox as a whole"

    async def describe_sandboxes(self) -> str:
        level = await resolve_level(self.isolation)
        if level == "none":
            return "on this machine without isolation: the code can do everything that you can"
        return f"in local sandboxes ({level})"

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return list_sandboxes()

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        return await delete_sandbox(sandbox_id)

    async def open_terminal(self, sandbox_id: str) -> int:
        # The shell is in a new sandbox over the folder of the kept one. Its limits and walls are those of the code.
        level, libraries = await self._resolve_isolation()
        with lock_kept_folder(sandbox_id) as folder:
            labels = read_record(folder)["labels"]
            until = read_kept_until(folder)
            handle = create_sandbox(self, level, labels, libraries, self._files.mounts, kept=folder)
        try:
            return await run_terminal(handle)
        finally:
            # `reap`, or the keeper after the hour, may have begun to remove the folder. Then it must not be kept.
            is_kept = read_kept_until(folder) > time.time()
            await run_shielded(handle.keep(until) if is_kept else handle.remove())

    async def list_volumes(self) -> list[str]:
        return list_volumes(self.volume_root)

    async def fingerprint(self) -> dict[str, Any]:
        """Return the common settings and Python's version. Limits can prevent a result, but not change it."""
        settings = {**await super().fingerprint(), "python": sys.version.split()[0]}
        if self.has_environment_packages:
            directories = tuple(find_environment_packages())
            settings["packages"] += [await asyncio.to_thread(digest_installed_versions, directories)]
        if self.volume_name is not None:  # A volume of this name below another root is a different volume.
            settings["volume"] += [str(find_volumes_root(self.volume_root))]
        return settings

    def list_versions(self) -> list[str]:
        folders = find_environment_packages() if self.has_environment_packages else [locate_packages(self.packages)]
        return [f"Python {sys.version.split()[0]}", *(list_installed_versions(folders) or super().list_versions())]

    async def open_volume(self, name: str) -> LocalVolume:
        return find_volume(self.volume_root, name)
