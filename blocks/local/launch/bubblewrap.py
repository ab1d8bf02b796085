"""The command lines of bubblewrap: for one sandbox, and for a zygote that sandboxes are forked from."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ....sandbox.confinement import policy as confinement_policy
from ...host_files.mounts import resolve_volume_mount
from .. import isolation

PACKAGES_MOUNT = "/packages"  # packages installed for the sandbox
MODULES_MOUNT = "/python-path"  # the directories of `python_path`
SCRIPTS_MOUNT = "/scripts"  # programs of the packages
PYTHON_MOUNT = "/python"  # the Python of code's processes
FOLDERS_MOUNT = "/.sandboxes"  # folders of all sandboxes, in a zygote; an empty directory in a sandbox
OWN_DIRECTORIES = ("/sandbox", "/tmp")  # mount points of the sandbox's own folder
# As root, the driver switches the code to another user. That works only outside a user namespace.
DRIVER_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
ZYGOTE_CAPABILITIES = (*DRIVER_CAPABILITIES, "CAP_SYS_ADMIN", "CAP_NET_ADMIN")  # more for a sandbox's namespaces


@dataclass(frozen=True)
class Mount:
    """A file or directory of the host that a sandbox sees at `target`."""

    source: str
    target: str
    is_writable: bool = False


def build_bubblewrap_command(folder: Path, mounts: tuple[Mount, ...], shm_bytes: int) -> list[str]:
    """Return bubblewrap's command line up to a sandbox's program; `shm_bytes` limits its /dev/shm."""
    user = _build_capabilities(DRIVER_CAPABILITIES) if os.geteuid() == 0 else ["--unshare-user"]
    own: list[str] = []
    for target, source in zip(OWN_DIRECTORIES, (folder / "work", folder / "tmp"), strict=True):
        own += ["--bind", str(source), target]
        for mount in mounts:
            for parent in list_parents_below(target, mount.target):  # Code cannot rename a mount point.
                directory = source / Path(parent).relative_to(target)
                directory.mkdir(mode=0o755, exist_ok=True)
                own += ["--bind", str(directory), parent]
    own += ["--ro-bind", str(folder / "python"), PYTHON_MOUNT]
    size = ["--size", str(shm_bytes)] if _can_size_tmpfs() else []
    shm = ["--perms", "1777", *size, "--tmpfs", "/dev/shm"]
    return [*_build_command([*user, "--die-with-parent"], own, mounts, shm), "--chdir", "/sandbox"]


def build_zygote_command(folders: Path, mounts: tuple[Mount, ...]) -> list[str]:
    """Return bubblewrap's command line up to a zygote's program; `folders` has the folders of all sandboxes.

    `--die-with-parent` is missing: it would end the zygote with the thread that started it. The end of its socket tells
    the zygote that its host died.
    """
    if os.geteuid() == 0:
        user = _build_capabilities(ZYGOTE_CAPABILITIES)
    else:
        # With another user id, bubblewrap would create a second user namespace without rights over the mounts.
        user = ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    own = ["--bind", str(folders), FOLDERS_MOUNT]
    for path in OWN_DIRECTORIES:
        own += ["--dir", path]
    own += ["--tmpfs", PYTHON_MOUNT]  # The zygote writes it once, for all its sandboxes.
    # All sandboxes share the zygote's /dev, but each has its own /dev/shm and /dev/pts.
    return [*_build_command(user, own, mounts, ["--dir", "/dev/shm"]), "--remount-ro", "/dev", "--chdir", "/"]


def _build_capabilities(names: tuple[str, ...]) -> list[str]:
    options = ["--cap-drop", "ALL"]
    for name in names:
        options += ["--cap-add", name]
    return options


def _build_command(user: list[str], own: list[str], mounts: tuple[Mount, ...], shm: list[str]) -> list[str]:
    command = [
        shutil.which("bwrap") or "bwrap",
        *user,
        # Make the driver the namespace's first process. Otherwise a process of bubblewrap is the first, and holds the
        # wire as standard input and output. Without Landlock, code could open that process's files and memory.
        *("--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--new-session"),
        *own,  # These precede the system's mounts, because Python may be below the host's /tmp.
        *_build_system_binds(has_landlock=isolation.find_landlock_abi() > 0),
        *("--proc", "/proc", "--dev", "/dev"),
        *shm,
    ]
    for mount in mounts:
        parents = [str(parent) for parent in reversed(Path(mount.target).parents) if str(parent) != "/"]
        option = "--bind" if mount.is_writable else "--ro-bind"
        command += [*_build_directories(parents), option, mount.source, mount.target]
    return [*command, "--remount-ro", "/"]


def _build_directories(paths: Iterable[str]) -> list[str]:
    """Return the options that create directories for every user. By default only bubblewrap's user may enter them."""
    options: list[str] = []
    for path in paths:
        options += ["--perms", "0755", "--dir", path]
    return options


@lru_cache(maxsize=64)  # combinations of mounts in a process
def list_covered_mounts(mounts: tuple[Mount, ...]) -> tuple[str, ...]:
    """Return the zygote's mounts that a sandbox's own directories would hide: Python below /tmp, or a volume."""
    targets = [*isolation.find_python_prefixes(), *(mount.target for mount in mounts)]
    return tuple(path for path in targets if any(Path(path).is_relative_to(own) for own in OWN_DIRECTORIES))


def list_parents_below(directory: str, target: str) -> list[str]:
    """Return the parents of a mount point that are below this directory of the code, topmost first."""
    parents = reversed(Path(target).parents)
    return [str(path) for path in parents if path.is_relative_to(directory) and path != Path(directory)]


@cache
def _can_size_tmpfs() -> bool:
    """Return whether this bubblewrap has `--size`, which came with version 0.7."""
    done = subprocess.run([shutil.which("bwrap") or "bwrap", "--help"], check=False, capture_output=True)
    return b"--size" in done.stdout + done.stderr


@cache
def _build_system_binds(has_landlock: bool) -> tuple[str, ...]:
    """Return the options that mount the system.

    With Landlock, mount all of /etc at once, because each mount costs 0.1 ms and Landlock closes most of /etc.
    """
    etc = ("/etc",) if has_landlock else confinement_policy.ETC
    links: list[str] = []
    binds: list[str] = []
    for path in (*confinement_policy.SYSTEM, *etc, *isolation.find_python_prefixes()):
        if os.path.islink(path) and path in confinement_policy.SYSTEM:
            links.append(path)
        elif os.path.exists(path):
            binds.append(path)
    parents: list[str] = []
    for path in binds:
        for parent in reversed(Path(path).parents):
            is_in_bind = any(parent.is_relative_to(bind) for bind in binds)
            if str(parent) not in ("/", *parents) and not is_in_bind:
                parents.append(str(parent))
    options = _build_directories(parents)
    for path in links:
        options += ["--symlink", os.readlink(path), path]
    for path in binds:
        options += ["--ro-bind", path, path]
    return tuple(options)


def resolve_mount_point(path: str) -> str:
    """Return a volume's path in the sandbox. Raises ConfigurationError for a path that the sandbox itself needs."""
    system = [*confinement_policy.SYSTEM, "/etc", "/proc", "/dev", "/sys", *isolation.find_python_prefixes()]
    system += [PACKAGES_MOUNT, MODULES_MOUNT, SCRIPTS_MOUNT, PYTHON_MOUNT]
    return resolve_volume_mount(path, system, not_above=OWN_DIRECTORIES)
