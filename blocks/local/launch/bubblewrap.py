"""The command lines of bubblewrap: for one sandbox, and for a zygote that sandboxes are forked from."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ....sandbox.confinement import policy as confinement_policy
from ....sandbox.errors import ConfigurationError
from .. import isolation
from ..inventory import USERS_FILE

PACKAGES_MOUNT = "/packages"  # where a sandbox has what was installed for it
MODULES_MOUNT = "/python-path"  # where it has modules of one's own
SCRIPTS_MOUNT = "/scripts"  # where it has the programs of packages
PYTHON_MOUNT = "/python"  # where it has its own Python
FOLDERS_MOUNT = "/.sandboxes"  # where a zygote has the folders of all sandboxes; an empty directory in a sandbox
OWN_DIRECTORIES = ("/sandbox", "/tmp")  # where a sandbox has its folder
# The driver makes the code another user, where the host is root. Root needs no user namespace for that, and in one it
# could not.
DRIVER_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
ZYGOTE_CAPABILITIES = (*DRIVER_CAPABILITIES, "CAP_SYS_ADMIN", "CAP_NET_ADMIN")  # to put up a sandbox's own walls


@dataclass(frozen=True)
class Mount:
    """A directory of the host's that a sandbox has at `target`."""

    source: str
    target: str
    is_writable: bool = False


def build_bubblewrap_command(folder: Path, mounts: tuple[Mount, ...], shm_bytes: int) -> list[str]:
    """The words that go before a sandbox's program; `shm_bytes` is what its /dev/shm may hold."""
    user = _build_capabilities(DRIVER_CAPABILITIES) if os.geteuid() == 0 else ["--unshare-user"]
    places: dict[str, Path] = dict(zip(OWN_DIRECTORIES, (folder / "work", folder / "tmp"), strict=True))
    own = [word for target, source in places.items() for word in ("--bind", str(source), target)]
    for mount in mounts:
        for parent in list_own_parents(mount.target):  # what something is mounted on cannot be renamed
            place = next(target for target in OWN_DIRECTORIES if Path(parent).is_relative_to(target))
            source = places[place] / Path(parent).relative_to(place)
            source.mkdir(mode=0o755, exist_ok=True)
            own += ["--bind", str(source), parent]
    own += ["--ro-bind", str(folder / "python"), PYTHON_MOUNT]
    users = folder / "python" / USERS_FILE
    after = ["--ro-bind", str(users), "/etc/passwd"] if users.exists() and os.path.exists("/etc/passwd") else []
    shm = ["--perms", "1777", *(["--size", str(shm_bytes)] if _can_size_tmpfs() else []), "--tmpfs", "/dev/shm"]
    return [*_build_command([*user, "--die-with-parent"], own, mounts, [*after, *shm]), "--chdir", "/sandbox"]


def build_zygote_command(folders: Path, mounts: tuple[Mount, ...]) -> list[str]:
    """The words that go before a zygote's program; `folders` is the directory with those of all sandboxes.

    It sees no host die, and need not: its socket tells it. A parent that has ended would be the thread that started it.
    """
    if os.geteuid() == 0:
        user = _build_capabilities(ZYGOTE_CAPABILITIES)
    else:
        # With another number bubblewrap would make a second user namespace, which has no rights over the mounts.
        user = ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    own = [
        "--bind",
        str(folders),
        FOLDERS_MOUNT,
        *(word for path in (*OWN_DIRECTORIES, PYTHON_MOUNT) for word in ("--dir", path)),
    ]
    # All sandboxes have its /dev, and each a /dev/shm and /dev/pts of its own.
    return [*_build_command(user, own, mounts, ["--dir", "/dev/shm"]), "--remount-ro", "/dev", "--chdir", "/"]


def _build_capabilities(names: tuple[str, ...]) -> list[str]:
    return ["--cap-drop", "ALL", *(word for name in names for word in ("--cap-add", name))]


def _build_command(user: list[str], own: list[str], mounts: tuple[Mount, ...], shm: list[str]) -> list[str]:
    return [
        shutil.which("bwrap") or "bwrap",
        *user,
        # The driver is the namespace's first process. One of bubblewrap's own would have the wire as its standard
        # input and output, and its memory, for any process of the same user to open where there is no Landlock.
        *("--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--new-session"),
        *own,  # before the system, for a Python may lie below the host's /tmp
        *_build_system_binds(has_landlock=isolation.find_landlock_abi() > 0),
        *("--proc", "/proc", "--dev", "/dev"),
        *shm,
        *(word for mount in mounts for word in _build_bind(mount)),
        *("--remount-ro", "/"),
    ]


@lru_cache(maxsize=64)  # of the volumes that a process has
def list_covered_mounts(mounts: tuple[Mount, ...]) -> tuple[str, ...]:
    """Where a zygote has what a sandbox's own folder covers: Python below /tmp, or a volume."""
    targets = [*isolation.find_python_prefixes(), *(mount.target for mount in mounts)]
    return tuple(path for path in targets if any(Path(path).is_relative_to(own) for own in OWN_DIRECTORIES))


def list_own_parents(target: str) -> list[str]:
    """The directories above a mount that code could exchange, being in the sandbox's own folder, from above down."""
    parents = map(str, reversed(Path(target).parents))
    return [path for path in parents for own in OWN_DIRECTORIES if path != own and Path(path).is_relative_to(own)]


@cache
def _can_size_tmpfs() -> bool:
    """Whether this bubblewrap knows `--size`: from 0.7 on."""
    done = subprocess.run([shutil.which("bwrap") or "bwrap", "--help"], check=False, capture_output=True)
    return b"--size" in done.stdout + done.stderr


@cache
def _build_system_binds(has_landlock: bool) -> tuple[str, ...]:
    """The options that mount the system; all of /etc at once, as a mount costs 0.1 ms, and Landlock closes most."""
    links = [path for path in confinement_policy.SYSTEM if os.path.islink(path)]
    etc = ("/etc",) if has_landlock else confinement_policy.ETC
    binds = [
        path
        for path in (*confinement_policy.SYSTEM, *etc, *isolation.find_python_prefixes())
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


def _build_bind(mount: Mount) -> list[str]:
    """The options that mount a directory; bubblewrap makes missing parents for its own user alone."""
    parents = [str(parent) for parent in reversed(Path(mount.target).parents) if str(parent) != "/"]
    option = "--bind" if mount.is_writable else "--ro-bind"
    words = [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]
    return [*words, option, mount.source, mount.target]


def resolve_mount_point(path: str) -> str:
    """The path of a volume in the sandbox. Raises ConfigurationError for one that the sandbox needs for itself."""
    mount = Path(os.path.normpath("/" + path.lstrip("/")))
    system = [*confinement_policy.SYSTEM, "/etc", "/proc", "/dev", "/sys", *isolation.find_python_prefixes()]
    system += [PACKAGES_MOUNT, MODULES_MOUNT, SCRIPTS_MOUNT, PYTHON_MOUNT]
    is_above = any(Path(other).is_relative_to(mount) for other in (*system, *OWN_DIRECTORIES))
    if is_above or any(mount.is_relative_to(other) for other in system):
        raise ConfigurationError(
            f"volume_mount_path is {path}, which a local sandbox needs for itself: name another place, such as /data"
        )
    return str(mount)
