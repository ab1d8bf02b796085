"""The command line of bubblewrap, which gives a local sandbox its namespaces and mounts."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path, PurePosixPath

from ...sandbox import confinement
from ...sandbox.errors import ConfigurationError
from . import isolation
from .host_python import find_python_prefixes

PACKAGES_MOUNT = "/packages"  # where the sandbox has what was installed for it


def build_bubblewrap_command(folder: Path, mounts: list[tuple[str, str, str]]) -> list[str]:
    """The words that go before a sandbox's program."""
    # Root needs no user namespace, and without one its children can become a user of their own.
    capabilities = [
        "--cap-drop",
        "ALL",
        *(word for cap in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", f"CAP_{cap}")),
    ]
    return [
        shutil.which("bwrap") or "bwrap",
        *(capabilities if os.geteuid() == 0 else ["--unshare-user"]),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session"),
        *_build_system_binds(),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--bind", str(folder / "work"), "/sandbox", "--bind", str(folder / "tmp"), "/tmp"),
        *(word for mount in mounts for word in _build_bind(*mount)),
        *("--chdir", "/sandbox", "--remount-ro", "/"),
    ]


@cache
def _build_system_binds() -> tuple[str, ...]:
    """The options that mount the system; all of /etc at once, as a mount costs 0.1 ms, and Landlock closes most."""
    links = [path for path in confinement.SYSTEM if os.path.islink(path)]
    etc = ("/etc",) if isolation.find_landlock_abi() else confinement.ETC
    binds = [
        path
        for path in (*confinement.SYSTEM, *etc, *find_python_prefixes())
        if path not in links and os.path.exists(path)
    ]
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


def _build_bind(option: str, source: str, target: str) -> list[str]:
    """The options that mount a directory; bubblewrap makes missing parents for its own user alone."""
    parents = [str(parent) for parent in reversed(PurePosixPath(target).parents) if str(parent) != "/"]
    return [*(word for parent in parents for word in ("--perms", "0755", "--dir", parent)), option, source, target]


def resolve_mount_point(path: str) -> str:
    """The path of a volume in the sandbox. Raises ConfigurationError for one that the sandbox needs for itself."""
    mount = PurePosixPath(os.path.normpath("/" + path.lstrip("/")))
    system = [
        PurePosixPath(path) for path in (*confinement.SYSTEM, "/etc", "/proc", "/dev", "/sys", *find_python_prefixes())
    ]
    own = [PurePosixPath("/sandbox"), PurePosixPath("/tmp"), PurePosixPath(PACKAGES_MOUNT)]
    is_above = any(other.is_relative_to(mount) for other in (*system, *own))
    if is_above or any(mount.is_relative_to(other) for other in system):
        raise ConfigurationError(
            f"volume_mount_path is {path}, which a local sandbox needs for itself: name another place, such as /data"
        )
    return str(mount)
