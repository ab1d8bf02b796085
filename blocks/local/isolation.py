"""The levels of isolation on this machine, and the driver's rules for code on each level."""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...sandbox.confinement import policy as confinement_policy
from ...sandbox.errors import ConfigurationError
from ..host_files.mounts import HostMount, overlaps
from .settings import LocalSettings

IsolationLevel = Literal["bubblewrap", "landlock", "none"]

LIMITS = (
    "memory_mib", "file_size_mib", "open_files", "cpu_seconds", "processes", "total_memory_mib", "total_processes",
    "disk_mib",
)  # fmt: skip

find_landlock_abi = cache(confinement_policy.probe_landlock_abi)


@cache
def find_python_prefixes() -> tuple[str, ...]:
    """Return the directories of this Python's installation that are outside the system's directories."""
    prefixes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix))
    system = ("/usr/", "/bin/", "/lib/")
    return tuple(path for path in prefixes if not path.startswith(system) and path not in ("/usr", "/"))


def list_layers(level: IsolationLevel) -> tuple[str, ...]:
    """Return the isolation layers of a level on this machine."""
    if level == "none":
        return ()
    layers = [f"landlock-{find_landlock_abi()}"] if find_landlock_abi() else []
    layers += ["seccomp"] if confinement_policy.find_architecture() else []
    layers += ["user"] if os.geteuid() == 0 else []
    return (*(["namespaces"] if level == "bubblewrap" else []), *layers, "limits")


def list_limits(settings: LocalSettings, level: IsolationLevel) -> dict[str, int]:
    """Return the options that limit code on a level, with their values."""
    values = {option: getattr(settings, option) for option in LIMITS}
    limits = {option: value for option, value in values.items() if value is not None}
    if level == "none" or limits.get("total_processes", settings.processes) < settings.processes:
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

    `writable` begins with the working directory. `readable` has the code's own Python and libraries.
    """
    mib = 1024 * 1024
    limits = {"AS": settings.memory_mib * mib, "FSIZE": settings.file_size_mib * mib, "CORE": 0}
    limits["NOFILE"] = settings.open_files
    if settings.cpu_seconds is not None:
        limits["CPU"] = settings.cpu_seconds
    if level == "none":
        return {"limits": limits}
    bubblewrap = level == "bubblewrap"
    # In a user namespace, or for the sandbox's own user, the kernel counts only this sandbox's processes.
    has_own_count = bubblewrap or uid is not None
    processes = min(settings.processes, settings.total_processes or settings.processes)
    limits["NPROC"] = processes + (0 if has_own_count else _count_user_tasks())
    policy = confinement_policy.Policy(
        readable=(*_list_readable_paths(), *readable, *(["/proc"] if bubblewrap else [])),
        writable=(*writable, "/dev/shm") if bubblewrap else writable,
        network=bubblewrap,
        own_mounts=bubblewrap,
        own_uid=uid is not None,
        abi=find_landlock_abi(),
        unix_sockets=not any(mount.is_directory for mount in mounts),
    )
    rules: dict[str, Any] = {"limits": limits, "uid": uid, "counts_user": not has_own_count}
    if mounts:
        read, on_files = confinement_policy.READ, confinement_policy.ON_FILES
        rules["mounts"] = [  # The driver compares them before code runs, because a link may have changed.
            [item.target, item.device, item.inode, read if item.is_directory else read & on_files] for item in mounts
        ]
    if find_landlock_abi():
        rules["landlock"] = policy.build_landlock_rules()
    machine = confinement_policy.find_architecture()
    if machine is not None:
        rules["seccomp"] = _build_syscall_filter(replace(policy, readable=(), writable=()), machine)
    if uid is not None and not bubblewrap:
        # The code keeps the capability to pass through closed directories, such as /root above an interpreter.
        # Landlock still decides what it may read.
        parents = {os.path.dirname(path) for path in (*writable, *readable, *(mount.target for mount in mounts))}
        parents.remove(os.path.dirname(writable[0]))  # The sandbox's own folder is open to the code's user.
        passages = [*find_python_prefixes(), tempfile.gettempdir(), *parents]
        directories = {str(above) for path in passages for above in (Path(path), *Path(path).parents)}
        rules["search"] = any(not os.stat(directory).st_mode & 0o001 for directory in directories)
    return rules


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
    return tuple(path for path in paths if os.path.exists(path))


def _count_user_tasks() -> int:
    """Return this user's current number of processes and threads, which all count against RLIMIT_NPROC."""
    total, me = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{name}").st_uid == me:
                    total += int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[17])
    return total
