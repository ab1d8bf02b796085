"""The levels of isolation on this machine, and the driver's rules for code on each level."""

import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from ...sandbox.confinement import policy as confinement_policy
from ...sandbox.errors import ConfigurationError
from ..host_files.mounts import HostMount, overlaps
from .settings import LocalSettings

MIB = 1024 * 1024
IsolationLevel = Literal["bubblewrap", "landlock", "none"]

LIMITS = (
    "memory_mib", "file_size_mib", "open_files", "cpu_seconds", "processes", "total_memory_mib", "total_processes",
    "disk_mib",
)  # fmt: skip

find_landlock_abi = cache(confinement_policy.probe_landlock_abi)


@cache
def find_python_prefixes() -> tuple[str, ...]:
    """Return the directories of this Python's installation that are outside the system's directories."""
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    system = ("/usr/", "/bin/", "/lib/")
    return tuple(path for path in sorted(prefixes) if not path.startswith(system) and path not in ("/usr", "/"))


def list_layers(level: IsolationLevel) -> tuple[str, ...]:
    """Return the isolation layers of a level on this machine."""
    if level == "none":
        return ()
    is_active = {
        "namespaces": level == "bubblewrap",
        f"landlock-{find_landlock_abi()}": find_landlock_abi() > 0,
        "seccomp": confinement_policy.find_architecture() is not None,
        "user": os.geteuid() == 0,
        "limits": True,
    }
    return tuple(layer for layer, active in is_active.items() if active)


def list_limits(settings: LocalSettings, level: IsolationLevel) -> dict[str, int]:
    """Return the options that limit code on a level, with their values."""
    limits: dict[str, int] = {}
    for option in LIMITS:
        value = getattr(settings, option)
        if value is not None:
            limits[option] = value
    is_total_smaller = settings.total_processes is not None and settings.total_processes < settings.processes
    if level == "none" or is_total_smaller:  # Then another limit, or none, stops the code from forking.
        del limits["processes"]
    return limits


def build_confinement(
    settings: LocalSettings,
    level: IsolationLevel,
    uid: int | None,
    writable: tuple[str, ...],
    readable: tuple[str, ...],
    mounts: tuple[HostMount, ...],
) -> dict[str, Any]:
    """Return the driver's rules for confining code: limits, Landlock rules, system call filter and user.

    Args:
        settings: The provider's settings.
        level: The level of isolation.
        uid: The id of the sandbox's own user, or None for the host's user.
        writable: The code's own directories, the working directory first, and the volume.
        readable: The code's own Python and its libraries.
        mounts: The files and directories of the host.
    """
    limits = {
        "AS": settings.memory_mib * MIB,
        "FSIZE": settings.file_size_mib * MIB,
        "CORE": 0,
        "NOFILE": settings.open_files,
    }
    if settings.cpu_seconds is not None:
        limits["CPU"] = settings.cpu_seconds
    if level == "none":
        return {"limits": limits}
    is_bubblewrap = level == "bubblewrap"
    limits["NPROC"] = min(settings.processes, settings.total_processes or settings.processes)
    if not has_own_count(level):
        limits["NPROC"] += _count_user_tasks()
    system_readable, system_writable = _list_readable_paths(), ()
    if is_bubblewrap:  # These show only the sandbox's own processes and shared memory.
        system_readable, system_writable = (*system_readable, "/proc"), ("/dev/shm",)
    policy = confinement_policy.Policy(
        readable=(*system_readable, *readable),
        writable=(*writable, *system_writable),
        network=is_bubblewrap,
        own_mounts=is_bubblewrap,
        own_uid=uid is not None,
        abi=find_landlock_abi(),
        unix_sockets=not any(mount.is_directory for mount in mounts),
    )
    rules: dict[str, Any] = {"limits": limits, "uid": uid, "counts_user": not has_own_count(level)}
    if mounts:
        # The driver compares the device and the inode before code runs, because a link may have changed.
        rules["mounts"] = [_build_mount_rule(mount) for mount in mounts]
    if find_landlock_abi():
        rules["landlock"] = policy.build_landlock_rules()
    machine = confinement_policy.find_architecture()
    if machine is not None:
        rules["seccomp"] = _build_syscall_filter(replace(policy, readable=(), writable=()), machine)
    if uid is not None and not is_bubblewrap:
        # The code keeps the capability to pass through closed directories, such as /root above an interpreter.
        # Landlock still decides what it may read.
        parents = {os.path.dirname(path) for path in (*writable, *readable, *(mount.target for mount in mounts))}
        parents.remove(os.path.dirname(writable[0]))  # The sandbox's own folder is open to the code's user.
        rules["search"] = _has_closed_directory([*find_python_prefixes(), tempfile.gettempdir(), *parents])
    return rules


def has_own_count(level: IsolationLevel) -> bool:
    """Return whether the kernel counts a sandbox's processes separately, by user namespace or by user."""
    return level == "bubblewrap" or (level == "landlock" and os.geteuid() == 0)


def _build_mount_rule(mount: HostMount) -> list[Any]:
    rights = confinement_policy.READ
    if not mount.is_directory:
        rights &= confinement_policy.ON_FILES
    return [mount.target, mount.device, mount.inode, rights]


def _has_closed_directory(paths: Sequence[str]) -> bool:
    """Return whether other users may not pass through one of these directories, or through one above it."""
    directories: set[str] = set()
    for path in paths:
        while path not in directories:
            directories.add(path)
            path = os.path.dirname(path)  # the parent of "/" is "/"
    return any(not os.stat(directory).st_mode & stat.S_IXOTH for directory in directories)


def check_mount_places(mounts: Sequence[HostMount], level: IsolationLevel) -> None:
    """Raise ConfigurationError if sandboxes of this level cannot have the mounts at their targets."""
    for mount in mounts:
        source = str(mount.source)
        if level != "bubblewrap" and mount.target != source:
            raise ConfigurationError(
                f"mounts: with isolation {level}, code sees this machine's own paths, so {source!r} "
                f"cannot be at {mount.target}: mount it at {source!r}, or use isolation bubblewrap"
            )
        for prefix in find_python_prefixes():  # The driver runs files of these directories before it confines code.
            if level == "bubblewrap" and overlaps(mount.target, prefix):
                raise ConfigurationError(
                    f"mounts: {mount.target} contains Python's files ({prefix}): use another path, such as /data/set"
                )


@cache
def _build_syscall_filter(policy: confinement_policy.Policy, machine: str) -> str:
    """Return the system call filter. Only Landlock's rules have paths, so sandboxes can share the filter."""
    return policy.build_seccomp_filter(machine)


@cache
def _list_readable_paths() -> tuple[str, ...]:
    paths = [*confinement_policy.SYSTEM, *confinement_policy.ETC, *confinement_policy.KERNEL, *find_python_prefixes()]
    existing = [path for path in paths if os.path.exists(path)]
    # A rule for a directory covers what is below it, so a link into the directory, such as /bin, needs no rule.
    return tuple(path for path in existing if not _is_link_below(path, existing))


def _is_link_below(path: str, directories: Sequence[str]) -> bool:
    """Return whether the path is a link to something below one of the directories."""
    target = os.path.realpath(path)
    return target != path and any(target.startswith(f"{directory}/") for directory in directories)


def _count_user_tasks() -> int:
    """Return this user's current number of processes and threads, which all count against RLIMIT_NPROC."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # The process has ended.
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total
