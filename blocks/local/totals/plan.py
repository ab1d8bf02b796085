"""Which of a sandbox's limits as a whole is held by what: a control group, the watcher, or the limits of its user."""

import os
from dataclasses import dataclass

from ....sandbox.errors import ConfigurationError
from ..settings import LocalSettings
from .cgroups import MIB, find_parents

OPTIONS = {"memory": "total_memory_mib", "pids": "total_processes", "cpu": "cpus"}  # by the controller


@dataclass(frozen=True)
class TotalsPlan:
    """What holds a sandbox's limits as a whole: `grouped` by controller, `watched` by the option's name."""

    grouped: dict[str, float]
    watched: dict[str, int]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that they are."""
        versions = sorted({find_parents()[controller].version for controller in self.grouped})
        return (*(f"cgroup-v{version}" for version in versions), *(["watcher"] if self.watched else []))


def plan_totals(settings: LocalSettings, level: str) -> TotalsPlan:
    """What is to hold the limits of these settings. Raises ConfigurationError for one that nothing here can hold."""
    grouped: dict[str, float] = {}
    watched: dict[str, int] = {}
    wanted = {"memory": settings.total_memory_mib, "pids": settings.total_processes, "cpu": settings.cpus}
    if has_own_count(level):
        del wanted["pids"]  # the limit of each process is the whole sandbox's
    for controller, limit in wanted.items():
        if limit is None:
            continue
        if controller in find_parents():
            grouped[controller] = limit * MIB if controller == "memory" else limit
        elif controller == "cpu":
            raise ConfigurationError(
                f"cpus={limit:g} takes control groups that this process may make, with the cpu controller, and there "
                "are none here: run it as a service with Delegate=yes (systemd-run --user -p Delegate=yes), or leave "
                "cpus out"
            )
        else:
            watched[OPTIONS[controller]] = int(limit)
    if settings.disk_mib is not None:
        watched["disk_mib"] = settings.disk_mib
    if level == "landlock" and not has_own_count(level) and settings.total_processes is None:
        # The kernel counts the user's other processes too, and so has room for more when those have ended.
        watched["processes"] = settings.processes
    return TotalsPlan(grouped, watched)


def has_own_count(level: str) -> bool:
    """Whether the kernel counts a sandbox's processes for itself: in a user namespace, or as a user of its own."""
    return level == "bubblewrap" or (level == "landlock" and os.geteuid() == 0)


def describe_totals(level: str) -> str:
    """What would hold limits for a sandbox as a whole on this level and this machine, in words."""
    parents = find_parents()
    holders = {option: "nothing" if name == "cpu" else "a watcher" for name, option in OPTIONS.items()}
    holders |= {OPTIONS[name]: f"cgroup v{parent.version}" for name, parent in parents.items()}
    if has_own_count(level):
        holders["total_processes"] = "the kernel's count of its own"
    return ", ".join(f"{option} by {holder}" for option, holder in {**holders, "disk_mib": "a watcher"}.items())
