"""The creation of a local sandbox: its folder, its settings, and the launch of its driver."""

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
from ..storage.local_volume import UMASK, LocalVolume, find_volume
from .cgroup import SandboxGroup, find_parent, plan_totals, try_remove_group
from .deletion import FIRST_UID, remove_folder
from .handle import LocalSandboxHandle
from .inventory import compute_mark, pick_folder, write_locked_labels
from .isolation import MIB, IsolationLevel, build_confinement, list_layers, list_limits
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

    def list_modules(self, folder: Path) -> Sequence[Path]:
        """Return the directories of the user's modules, for the sandbox in this folder."""
        if self.copied_modules is None:
            return self.modules
        return [Path(path) for path in self.copied_modules.list_directories(f"{folder}/{COPIED_MODULES}")]


NO_LIBRARIES = Libraries()


@dataclass(frozen=True)
class Layout:
    """The paths in a sandbox: its own directories, the volume, and the mounts of libraries.

    Without bubblewrap, code sees the host's own paths, so each mount's target is its source.
    """

    work: str
    tmp: str
    python: str
    volumes: list[Mount]  # one or none
    packages: list[Mount]
    modules: list[Mount]
    scripts: list[Mount]  # one directory or none

    def list_library_mounts(self) -> list[Mount]:
        return [*self.packages, *self.modules, *self.scripts]

    def build_python_directory(self) -> dict[str, Any]:
        """Return the arguments of `write_python_directory`."""
        return {
            "python": find_python(),
            "first": [mount.target for mount in self.modules],
            "last": [mount.target for mount in self.packages],
            "scripts": self.scripts[0].target if self.scripts else None,
        }


def create_sandbox(
    settings: LocalSettings,
    level: IsolationLevel,
    labels: dict[str, str],
    libraries: Libraries = NO_LIBRARIES,
    host_mounts: tuple[HostMount, ...] = (),
    kept: Path | None = None,
) -> LocalSandboxHandle:
    """Create a sandbox whose driver does not run yet, in a new folder or in that of a `kept` sandbox."""
    has_own_user = os.geteuid() == 0 and level != "none"
    for mount in host_mounts:
        mount.check_source()
    if has_own_user:
        check_open_to_others("packages", *libraries.packages)
        check_open_to_others("mounts", *(mount.source for mount in host_mounts))
    volume, gid = None, None
    if settings.volume_name is not None:
        volume = find_volume(settings.volume_root, settings.volume_name)
        gid = volume.create()

    folder = kept or pick_folder()
    layout = _plan_layout(settings, level, folder, libraries, volume)
    python_directory = layout.build_python_directory()
    totals = plan_totals(settings, level)
    group = SandboxGroup(find_parent().path / folder.name, totals.grouped)
    try:
        uid = _make_folder(folder, is_new=kept is None, has_own_user=has_own_user)
        if libraries.copied_modules is not None and kept is None:
            (folder / COPIED_MODULES).mkdir()
            libraries.copied_modules.write(folder / COPIED_MODULES)
        if level != "bubblewrap":
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

    writable = (layout.work, layout.tmp, *(mount.target for mount in layout.volumes))
    readable = (layout.python, *(mount.target for mount in layout.list_library_mounts()))
    confinement = build_confinement(settings, level, uid, writable, readable, host_mounts)
    confinement["limits"]["RSS"] = compute_mark(folder)
    if gid is not None:
        confinement.update(gid=gid, umask=UMASK)
    driver_settings = _build_driver_settings(settings, level, layout, confinement)
    launch = Launch(folder, is_bubblewrap=False)
    if level == "bubblewrap":
        disk_mib = 0 if kept else settings.disk_mib or 0
        data_mounts = [Mount(str(mount.source), mount.target) for mount in host_mounts]
        mounts = (*layout.volumes, *layout.list_library_mounts(), *data_mounts)
        launch = Launch(folder, True, mounts, _compute_shm_bytes(settings), python_directory, disk_mib * MIB)
    watched = WatchedSandbox(totals.watched) if totals.watched else None
    layers = (*list_layers(level), *totals.layers)
    handle = LocalSandboxHandle(folder, level, layers, driver_settings, launch, volume, lock, group, watched)
    handle.limits = list_limits(settings, level)
    return handle


def _build_driver_settings(
    settings: LocalSettings, level: IsolationLevel, layout: Layout, confinement: dict[str, Any]
) -> DriverSettings:
    return DriverSettings(
        cwd=layout.work,
        volume=layout.volumes[0].target if layout.volumes else None,
        environment={"PATH": CODE_PATH, **settings.build_host_environment(layout.work, layout.tmp)},
        temporary=[layout.tmp, "/dev/shm"] if level == "bubblewrap" else [layout.tmp],
        path=[mount.target for mount in layout.packages],
        python_path=[mount.target for mount in layout.modules],
        executable=f"{layout.python}/bin/python",
        heartbeat=None,  # On one machine the end of the wire is enough.
        lifetime=settings.lifetime,
        confinement=confinement,
    )


def _compute_shm_bytes(settings: LocalSettings) -> int:
    """Return the size of /dev/shm, where files stay when the code that wrote them was killed."""
    if settings.total_memory_mib is None:
        return settings.memory_mib * MIB
    return min(settings.memory_mib, settings.total_memory_mib // 2) * MIB  # The rest is for other code.


def _plan_layout(
    settings: LocalSettings, level: IsolationLevel, folder: Path, libraries: Libraries, volume: LocalVolume | None
) -> Layout:
    is_bubblewrap = level == "bubblewrap"

    def plan(directories: Sequence[Path], mount_point: str) -> list[Mount]:
        """Return the mounts of these directories, with bubblewrap at the mount point or below it."""
        if not is_bubblewrap:
            return [Mount(str(path), str(path)) for path in directories]
        if len(directories) == 1:
            return [Mount(str(directories[0]), mount_point)]
        return [Mount(str(path), f"{mount_point}/{number}") for number, path in enumerate(directories)]

    volumes: list[Mount] = []
    if volume is not None:
        path = resolve_mount_point(settings.volume_mount_path) if is_bubblewrap else os.path.realpath(volume.path)
        volumes = [Mount(str(volume.path), path, is_writable=True)]
    own = (*OWN_DIRECTORIES, PYTHON_MOUNT) if is_bubblewrap else (f"{folder}/work", f"{folder}/tmp", f"{folder}/python")
    return Layout(
        *own,
        volumes=volumes,
        packages=plan(libraries.packages, PACKAGES_MOUNT),
        modules=plan(libraries.list_modules(folder), MODULES_MOUNT),
        scripts=plan([] if libraries.scripts is None else [libraries.scripts], SCRIPTS_MOUNT),
    )


def _make_folder(folder: Path, *, is_new: bool, has_own_user: bool) -> int | None:
    """Create the directories of a new sandbox, or clean up a kept one's, and return the id of the code's user."""
    if is_new:
        folder.mkdir(mode=0o700)
    else:
        shutil.rmtree(folder / "python", ignore_errors=True)
    uid = None
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
