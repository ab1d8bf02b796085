"""Making a local sandbox: its folder, its settings, and the command that starts its driver."""

from __future__ import annotations

import os
from pathlib import Path

from ...sandbox.errors import SandboxStartError
from ...sandbox.provider_api import DriverSettings
from .bubblewrap import PACKAGES_MOUNT, build_bubblewrap_command, resolve_mount_point
from .handle import LocalSandboxHandle
from .host_python import build_boot_program, find_python
from .inventory import pick_folder, remove_folder, write_locked_labels
from .isolation import IsolationLevel, build_confinement
from .settings import LocalSettings
from .volume import UMASK, LocalVolume, find_volumes_root

FIRST_UID = 0x5A000000  # of the users that code runs as where the host is root: far from those that systems hand out


def create_sandbox(
    settings: LocalSettings, level: IsolationLevel, labels: dict[str, str], packages: Path | None = None
) -> LocalSandboxHandle:
    """A new sandbox, whose driver does not run yet. Raises ConfigurationError, SandboxStartError."""
    volume, gid, mount = None, None, None
    if settings.volume_name is not None:
        volume = LocalVolume(find_volumes_root(settings.volume_root), settings.volume_name)
        gid = volume.create()
        mount = (
            resolve_mount_point(settings.volume_mount_path) if level == "bubblewrap" else os.path.realpath(volume.path)
        )
    folder = pick_folder()
    has_own_user = os.geteuid() == 0 and level != "none"
    uid = FIRST_UID + int.from_bytes(os.urandom(3), "big") if has_own_user else None
    lock: int | None = None
    try:
        folder.mkdir(mode=0o700)
        (folder / "work").mkdir(mode=0o755)
        (folder / "tmp").mkdir(mode=0o755)
        lock = write_locked_labels(folder, labels)
        if uid is not None:
            # The code may go through the folder itself, and no more than that.
            os.chown(folder, 0, uid)
            folder.chmod(0o710)
            for path in (folder / "work", folder / "tmp"):
                os.chown(path, uid, uid)
    except OSError as error:
        remove_folder(folder)
        if lock is not None:
            os.close(lock)
        raise SandboxStartError(
            f"no folder for a sandbox could be made in {folder.parent}: {error.strerror}"
        ) from error
    work, tmp = ("/sandbox", "/tmp") if level == "bubblewrap" else (str(folder / "work"), str(folder / "tmp"))
    installed = None if packages is None else PACKAGES_MOUNT if level == "bubblewrap" else str(packages)
    programs = [os.path.dirname(find_python()), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": ":".join([*programs, f"{installed}/bin"] if installed else programs),
        "HOME": work,
        "TMPDIR": tmp,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: value.get_secret_value() for name, value in settings.environment.items()},
    }
    driver_settings = DriverSettings(
        cwd=work,
        volume=mount,
        environment=environment,
        path=[installed] if installed else [],
        heartbeat=None,  # the wire's end is enough on one machine
        lifetime=settings.lifetime,
        confinement=build_confinement(settings, level, uid, (work, tmp), mount, installed),
    )
    if gid is not None:
        driver_settings.confinement.update(gid=gid, umask=UMASK)
    # In a process namespace nothing outlives the first process; elsewhere that takes somebody who watches.
    python = [find_python(), "-I", "-S", "-c", build_boot_program(is_watched=level != "bubblewrap")]
    if level == "bubblewrap":
        mounts = [] if volume is None or mount is None else [("--bind", str(volume.path), mount)]
        if packages is not None:
            mounts.append(("--ro-bind", str(packages), PACKAGES_MOUNT))
        return LocalSandboxHandle(
            folder, level, driver_settings, [*build_bubblewrap_command(folder, mounts), *python], "/", volume, lock
        )
    return LocalSandboxHandle(folder, level, driver_settings, python, work, volume, lock)
