"""The creation of a local sandbox: its folder, its settings, and the launch of its driver."""

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import SandboxStartError
from ...sandbox.wire.python_directory import write_python_directory
from ..host_files.mounts import HostMount
from ..host_files.python_path import PythonPath
from ..host_files.source_tree import check_open_to_others
from ..storage.local_volume import UMASK, find_volume
from .cgroup import MIB, SandboxGroup, find_parent, plan_totals, try_remove_group
from .deletion import FIRST_UID, remove_folder
from .handle import LocalSandboxHandle
from .inventory import compute_mark, pick_folder, write_locked_labels
from .isolation import IsolationLevel, build_confinement, list_layers, list_limits
from .launch.bubblewrap import (
    MODULES_MOUNT,
    OWN_DIRECTORIES,
    PACKAGES_MOUNT,
    PYTHON_MOUNT,
    SCRIPTS_MOUNT,
    Mount,
    resolve_mount_point,
)
from .launch.driver_process import find_python
from .launch.launcher import Launch
from .settings import LocalSettings
from .watcher import WatchedSandbox

COPIED_MODULES = "python-path"  # directory in a sandbox's folder
CODE_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Libraries:
    """The directories that code imports from: packages, after the standard library, and the user's modules.

    `scripts` is a directory of the packages' programs. `copied_modules` are copied into the sandbox's own folder, where
    nothing stops the code from changing them.
    """

    packages: Sequence[Path] = ()
    scripts: Path | None = None
    modules: Sequence[Path] = ()
    copied_modules: PythonPath | None = None

    def list_mounts(self, folder: Path) -> tuple[list[Mount], list[Mount], list[Mount]]:
        """Return the mounts of packages, modules and scripts for the sandbox in this folder."""
        copies = (
            [] if self.copied_modules is None else self.copied_modules.list_directories(f"{folder}/{COPIED_MODULES}")
        )
        return (
            _mount_all(self.packages, PACKAGES_MOUNT),
            _mount_all([*self.modules, *map(Path, copies)], MODULES_MOUNT),
            [] if self.scripts is None else [Mount(str(self.scripts), SCRIPTS_MOUNT)],
        )


NO_LIBRARIES = Libraries()


def create_sandbox(
    settings: LocalSettings,
    level: IsolationLevel,
    labels: dict[str, str],
    libraries: Libraries = NO_LIBRARIES,
    host_mounts: tuple[HostMount, ...] = (),
    kept: Path | None = None,
) -> LocalSandboxHandle:
    """Create a sandbox whose driver does not run yet, in a new folder or in that of a `kept` sandbox."""
    is_bubblewrap = level == "bubblewrap"
    has_own_user = os.geteuid() == 0 and level != "none"
    for mount in host_mounts:
        mount.check_source()
    if has_own_user:
        check_open_to_others("packages", *libraries.packages)
        check_open_to_others("mounts", *(mount.source for mount in host_mounts))
    volume, gid, volumes = None, None, list[Mount]()
    if settings.volume_name is not None:
        volume = find_volume(settings.volume_root, settings.volume_name)
        gid = volume.create()
        path = resolve_mount_point(settings.volume_mount_path) if is_bubblewrap else os.path.realpath(volume.path)
        volumes = [Mount(str(volume.path), path, is_writable=True)]
    folder = kept or pick_folder()
    shared = libraries.list_mounts(folder)
    packages, modules, scripts = (
        [mount.target if is_bubblewrap else mount.source for mount in mounts] for mounts in shared
    )
    python_directory: dict[str, Any] = {
        "python": find_python(), "first": modules, "last": packages, "scripts": next(iter(scripts), None),
    }  # fmt: skip
    totals = plan_totals(settings, level)
    group = SandboxGroup(find_parent().path / folder.name, totals.grouped)
    try:
        uid = _make_folder(folder, is_new=kept is None, has_own_user=has_own_user)
        if libraries.copied_modules is not None and kept is None:
            (folder / COPIED_MODULES).mkdir()
            libraries.copied_modules.write(folder / COPIED_MODULES)
        if not is_bubblewrap:
            write_python_directory(f"{folder}/python", **python_directory)
        # The labels precede the group, so that a process that finds the folder also finds the group.
        lock = write_locked_labels(folder, labels, group.path)
        group.create()
    except OSError as error:
        try_remove_group(group.path)
        if kept is None:
            remove_folder(folder)
        where = error.filename or folder.parent
        raise SandboxStartError(f"a sandbox could not be created ({where}): {error.strerror}") from error
    work, tmp, python = (
        (*OWN_DIRECTORIES, PYTHON_MOUNT)
        if is_bubblewrap
        else (f"{folder}/{name}" for name in ("work", "tmp", "python"))
    )
    volume_paths = [mount.target for mount in volumes]
    confinement = build_confinement(
        settings, level, uid, (work, tmp, *volume_paths), (python, *packages, *modules, *scripts), host_mounts
    )
    confinement["limits"]["RSS"] = compute_mark(folder)
    if gid is not None:
        confinement.update(gid=gid, umask=UMASK)
    driver_settings = DriverSettings(
        cwd=work,
        volume=next(iter(volume_paths), None),
        environment={"PATH": CODE_PATH, **settings.build_host_environment(work, tmp)},
        temporary=[tmp, "/dev/shm"] if is_bubblewrap else [tmp],
        path=packages,
        python_path=modules,
        executable=f"{python}/bin/python",
        heartbeat=None,  # On one machine the end of the wire is enough.
        lifetime=settings.lifetime,
        confinement=confinement,
    )
    launch = Launch(folder, is_bubblewrap)
    if is_bubblewrap:
        # At most half of the total memory, because files in /dev/shm stay when the code that wrote them was killed.
        shm_mib = min(settings.memory_mib, (settings.total_memory_mib or 2 * settings.memory_mib) // 2)
        mounts = (*volumes, *itertools.chain(*shared), *(Mount(str(each.source), each.target) for each in host_mounts))
        disk_mib = 0 if kept else settings.disk_mib or 0
        launch = Launch(folder, is_bubblewrap, mounts, shm_mib * MIB, python_directory, disk_mib * MIB)
    watched = WatchedSandbox(totals.watched) if totals.watched else None
    layers = (*list_layers(level), *totals.layers)
    handle = LocalSandboxHandle(folder, level, layers, driver_settings, launch, volume, lock, group, watched)
    handle.limits = list_limits(settings, level)
    return handle


def _make_folder(folder: Path, *, is_new: bool, has_own_user: bool) -> int | None:
    """Create the directories of a new sandbox, or clean up a kept one's, and return the id of the code's user."""
    uid = None
    if is_new:
        folder.mkdir(mode=0o700)
    else:
        shutil.rmtree(folder / "python", ignore_errors=True)
    if has_own_user:
        uid = FIRST_UID + int.from_bytes(os.urandom(3), "big") if is_new else (folder / "work").stat().st_uid
    for path in (folder / "work", folder / "tmp"):
        path.mkdir(exist_ok=not is_new)
        path.chmod(0o755)  # Override a strict umask: a root host's supervisor enters without root's rights.
        if uid is not None:
            os.chown(path, uid, uid)
    if uid is not None:
        # The code may only pass through the folder itself.
        os.chown(folder, 0, uid)
        folder.chmod(0o710)
    return uid


def _mount_all(directories: Sequence[Path], target: str) -> list[Mount]:
    """Return bubblewrap's mounts of these directories, at `target` or below it."""
    if len(directories) == 1:
        return [Mount(str(directories[0]), target)]
    return [Mount(str(path), f"{target}/{number}") for number, path in enumerate(directories)]
