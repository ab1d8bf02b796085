"""The creation of a local sandbox: its folder, its settings, and the launch of its driver."""

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...sandbox.driver_settings import DriverSettings
from ...sandbox.errors import ConfigurationError, SandboxStartError
from ...sandbox.wire.python_directory import remove_python_directory, write_python_directory
from ..host_files.mounts import HostMount
from ..host_files.python_path import PythonPath
from ..storage.local_volume import UMASK, find_volume
from .cgroup import MIB, SandboxGroup, find_parent, plan_totals, try_remove_group
from .deletion import FIRST_UID, remove_folder
from .handle import LocalSandboxHandle
from .inventory import USERS_FILE, compute_mark, pick_folder, write_locked_labels
from .isolation import IsolationLevel, build_confinement, list_layers, list_limits
from .launch.bubblewrap import MODULES_MOUNT, PACKAGES_MOUNT, PYTHON_MOUNT, SCRIPTS_MOUNT, Mount, resolve_mount_point
from .launch.driver_process import START_ENVIRONMENT, find_python
from .launch.launcher import Launch
from .settings import LocalSettings
from .watcher import WatchedSandbox


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


NO_LIBRARIES = Libraries()
USER_NAME = "sandbox"  # name of the user that runs the code


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
    for mount in host_mounts:
        mount.check_source()
    volume, gid, volume_path = None, None, None
    if settings.volume_name is not None:
        volume = find_volume(settings.volume_root, settings.volume_name)
        gid = volume.create()
        volume_path = (
            resolve_mount_point(settings.volume_mount_path) if is_bubblewrap else os.path.realpath(volume.path)
        )
    has_own_user = os.geteuid() == 0 and level != "none"
    if has_own_user:
        for path in libraries.packages:
            if os.stat(path).st_mode & 0o005 != 0o005:
                raise ConfigurationError(
                    f"packages: {path} is not readable by other users, and the sandbox's code runs as one: "
                    f"chmod -R o+rX {path}, or run as an ordinary user"
                )
        for mount in host_mounts:
            mount.check_open_to_others()
    folder = kept or pick_folder()
    plan = plan_totals(settings, level)
    group = SandboxGroup(find_parent().path / folder.name, plan.grouped)
    uid = FIRST_UID + int.from_bytes(os.urandom(3), "big") if has_own_user else None
    if kept is not None:
        uid = (kept / "work").stat().st_uid if has_own_user else None
        remove_python_directory(str(kept / "python"), [USERS_FILE])
    try:
        if kept is None:
            folder.mkdir(mode=0o700)
        for path in () if kept is not None else (folder / "work", folder / "tmp"):
            path.mkdir()
            path.chmod(0o755)  # Override a strict umask: a root host's supervisor enters without root's rights.
            if uid is not None:
                os.chown(path, uid, uid)
        if uid is not None:
            # The code may only pass through the folder itself.
            os.chown(folder, 0, uid)
            folder.chmod(0o710)
        module_directories = [*libraries.modules]
        if libraries.copied_modules is not None:
            if kept is None:
                libraries.copied_modules.write(folder / "python-path")
            copies = libraries.copied_modules.list_directories(str(folder / "python-path"))
            module_directories += map(Path, copies)
        shared = [
            *(_mount_all(libraries.packages, PACKAGES_MOUNT), _mount_all(module_directories, MODULES_MOUNT)),
            [] if libraries.scripts is None else [Mount(str(libraries.scripts), SCRIPTS_MOUNT)],
        ]
        packages, modules, scripts = (
            [mount.target if is_bubblewrap else mount.source for mount in group] for group in shared
        )
        python_directory: dict[str, Any] = {
            "python": find_python(), "first": modules, "last": packages, "scripts": next(iter(scripts), None),
        }  # fmt: skip
        if not is_bubblewrap:
            write_python_directory(str(folder / "python"), **python_directory)
        # The labels precede the group, so that a process that finds the folder also finds the group.
        lock = write_locked_labels(folder, labels, group.path)
        group.create()
    except OSError as error:
        try_remove_group(group.path)
        if kept is None:
            remove_folder(folder)
        raise SandboxStartError(
            f"a sandbox's folder or control group could not be created ({error.filename or folder.parent}): "
            f"{error.strerror}"
        ) from error
    work, tmp = ("/sandbox", "/tmp") if is_bubblewrap else (str(folder / "work"), str(folder / "tmp"))
    python = PYTHON_MOUNT if is_bubblewrap else str(folder / "python")
    environment = {
        **START_ENVIRONMENT,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "USER": USER_NAME,
        "LOGNAME": USER_NAME,
        "TMPDIR": tmp,
        **{name: value.get_secret_value() for name, value in settings.environment.items()},
    }
    driver_settings = DriverSettings(
        cwd=work,
        volume=volume_path,
        environment=environment,
        temporary=[tmp, "/dev/shm"] if is_bubblewrap else [tmp],
        path=packages,
        python_path=modules,
        executable=f"{python}/bin/python",
        heartbeat=None,  # On one machine the end of the wire is enough.
        lifetime=settings.lifetime,
        confinement=build_confinement(
            settings, level, uid, (work, tmp), volume_path, (*packages, *modules, *scripts), host_mounts, (python,)
        ),
    )
    driver_settings.confinement["limits"]["RSS"] = compute_mark(folder)
    if gid is not None:
        driver_settings.confinement.update(gid=gid, umask=UMASK)
    mounts = [] if volume is None or volume_path is None else [Mount(str(volume.path), volume_path, is_writable=True)]
    mounts += [mount for group in shared for mount in group]
    mounts += [Mount(str(mount.source), mount.target) for mount in host_mounts]
    # At most half of the total memory, because files in /dev/shm stay when the code that wrote them was killed.
    shm_mib = min(settings.memory_mib, (settings.total_memory_mib or 2 * settings.memory_mib) // 2)
    launch = Launch(folder, is_bubblewrap)
    if is_bubblewrap:
        user_line, disk_mib = _build_user_line(uid), 0 if kept else settings.disk_mib or 0
        launch = Launch(
            folder, is_bubblewrap, tuple(mounts), shm_mib * MIB, python_directory, user_line, disk_mib * MIB
        )
    watched = WatchedSandbox(plan.watched) if plan.watched else None
    layers = (*list_layers(level), *plan.layers)
    handle = LocalSandboxHandle(folder, level, layers, driver_settings, launch, volume, lock, group, watched)
    handle.disk_mib = settings.disk_mib
    handle.limits = list_limits(settings, level)
    return handle


@cache
def _is_known_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _build_user_line(uid: int | None) -> str:
    """Return the line of the sandbox's user if /etc/passwd can be read and lacks it; otherwise nothing."""
    if not os.access("/etc/passwd", os.R_OK) or (uid is None and _is_known_user(os.geteuid())):
        return ""
    user, group = (os.geteuid(), os.getegid()) if uid is None else (uid, uid)
    return f"{USER_NAME}:x:{user}:{group}::/sandbox:/bin/sh\n"


def _mount_all(directories: Sequence[Path], target: str) -> list[Mount]:
    """Return bubblewrap's mounts of these directories, at `target` or below it."""
    if len(directories) == 1:
        return [Mount(str(directories[0]), target)]
    return [Mount(str(path), f"{target}/{number}") for number, path in enumerate(directories)]
