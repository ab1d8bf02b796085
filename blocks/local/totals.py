"""The plan that assigns each limit on a whole sandbox to its control group, the watcher or its file system."""

import os
from dataclasses import dataclass

from ...sandbox.errors import ConfigurationError
from .cgroup import MIB, find_parent
from .settings import LocalSettings

OPTIONS = {"memory": "total_memory_mib", "pids": "total_processes", "cpu": "cpus"}  # the option for each controller


@dataclass(frozen=True)
class TotalsPlan:
    """The limits on a whole sandbox: `grouped` by controller for its control group, `watched` by option."""

    grouped: dict[str, float]
    watched: dict[str, int]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of these limits' isolation layers."""
        return (*(["cgroup-v2"] if self.grouped else []), *(["watcher"] if self.watched else []))


def plan_totals(settings: LocalSettings, level: str) -> TotalsPlan:
    """Return what enforces these settings' limits. Raises ConfigurationError if nothing here can enforce one."""
    grouped: dict[str, float] = {}
    watched: dict[str, int] = {}
    wanted = {"memory": settings.total_memory_mib, "pids": settings.total_processes, "cpu": settings.cpus}
    if has_own_count(level):
        del wanted["pids"]  # RLIMIT_NPROC already limits the whole sandbox.
    for controller, limit in wanted.items():
        if limit is None:
            continue
        if controller in find_parent().controllers:
            grouped[controller] = limit * MIB if controller == "memory" else limit
        elif controller == "cpu":
            raise ConfigurationError(
                f"`cpus` is {limit:g}, and needs control groups of version 2 with the cpu "
                "controller, which this process cannot create: run it with systemd-run --user -p "
                f"Delegate=yes, or leave `cpus` out"
            )
        else:
            watched[OPTIONS[controller]] = int(limit)
    if settings.disk_mib is not None and level != "bubblewrap":
        raise ConfigurationError(
            f"`disk_mib` is {settings.disk_mib}, and needs isolation bubblewrap or the provider "
            f"container: use one of them, or leave `disk_mib` out"
        )
    if level == "landlock" and not has_own_count(level) and settings.total_processes is None:
        # RLIMIT_NPROC also counts the user's other processes, so the code could start more when those end.
        watched["processes"] = settings.processes
    return TotalsPlan(grouped, watched)


def has_own_count(level: str) -> bool:
    """Return whether the kernel counts a sandbox's processes separately, by user namespace or by user."""
    return level == "bubblewrap" or (level == "landlock" and os.geteuid() == 0)
