"""The limits on a whole sandbox: control groups of version 2 with one group per sandbox, or else the watcher."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...sandbox.errors import ConfigurationError
from .isolation import MIB, IsolationLevel, has_own_count
from .settings import LocalSettings

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000  # microseconds; the kernel's default period for CPU quotas
REMOVE_SECONDS = 1.0  # time for killed processes to leave their group
ROUND_SECONDS = 0.01


class Parent(NamedTuple):
    """A group below which this process may create groups, and the controllers that can limit those."""

    path: Path
    controllers: tuple[str, ...]


@cache
def find_parent() -> Parent:
    """Return the nearest group below which this process can limit groups: its own, or one above it.

    Without such a group, return the topmost group, without controllers.
    """
    top = Path("/sys/fs/cgroup")
    no_parent = Parent(top, ())
    if not os.path.exists("/proc/thread-self/children"):  # `SandboxGroup.add` needs this file.
        return no_parent
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):  # The group of version 2.
            path = top / line.removeprefix("0::/")
            while path.is_relative_to(top) and _may_create_groups(path):
                controllers = _enable_controllers(path)
                if controllers:
                    return Parent(path, controllers)
                path = path.parent
    return no_parent


def _may_create_groups(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)


def _enable_controllers(path: Path) -> tuple[str, ...]:
    """Enable the controllers for the groups below a group, and return those that are enabled then.

    The kernel refuses this for a group that directly contains processes.
    """
    switches = path / "cgroup.subtree_control"
    try:
        for name in CONTROLLERS:
            if name not in switches.read_text().split():
                with suppress(OSError):
                    switches.write_text(f"+{name}")
        enabled = switches.read_text().split()
    except OSError:
        return ()
    return tuple(name for name in CONTROLLERS if name in enabled)


@dataclass
class SandboxGroup:
    """A sandbox's group: its directory, and its limits by controller. Without limits the methods do nothing."""

    directory: Path
    limits: dict[str, float] = field(default_factory=dict[str, float])
    _memory_kills: int = 0

    @property
    def path(self) -> str:
        """Return the directory as text; empty if there is no group."""
        return str(self.directory) if self.limits else ""

    def create(self) -> None:
        """Create the group with its limits. Raises OSError."""
        if not self.limits:
            return
        self.directory.mkdir()
        for controller, limit in self.limits.items():
            value = f"{int(limit * PERIOD_US)} {PERIOD_US}" if controller == "cpu" else str(int(limit))
            (self.directory / f"{controller}.max").write_text(value)
        swap = self.directory / "memory.swap.max"
        if "memory" in self.limits and swap.exists():  # A kernel may not account for swap.
            swap.write_text("0")

    def add(self, pid: int) -> None:
        """Move a process and its descendants into the group, in about 10 ms. Raises OSError."""
        if not self.limits:
            return
        moving = [pid]
        for process in moving:  # The list grows in the loop.
            try:
                (self.directory / "cgroup.procs").write_text(str(process))
            except ProcessLookupError:
                if process == pid:
                    raise
            # Children that start after the move are in the group. Move the earlier children too.
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                with suppress(OSError):
                    moving += [int(word) for word in children.read_text().split()]

    def has_new_memory_kill(self) -> bool:
        """Return whether the kernel has killed a process of this group for lack of memory since the last call."""
        if "memory" not in self.limits:
            return False
        before = self._memory_kills
        with suppress(OSError):
            for line in (self.directory / "memory.events").read_text().splitlines():
                event, count = line.split()
                if event == "oom_kill":
                    self._memory_kills = int(count)
        return self._memory_kills > before


def try_remove_group(path: str) -> bool:
    """Remove an empty group, and return whether it is gone. An empty path is no group."""
    if not path:
        return True
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def remove_group(path: str) -> None:
    """Kill the processes in a group and remove it. A group with a surviving process stays."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while not try_remove_group(path) and time.monotonic() < deadline:
        with suppress(OSError):
            Path(path, "cgroup.kill").write_text("1")
        time.sleep(ROUND_SECONDS)


@dataclass(frozen=True)
class TotalsPlan:
    """The limits on a whole sandbox: `grouped` by controller for its control group, `watched` by option."""

    grouped: dict[str, float]
    watched: dict[str, int]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the isolation layers that enforce these limits."""
        enforcers = (("cgroup-v2", self.grouped), ("watcher", self.watched))
        return tuple(name for name, limits in enforcers if limits)


def plan_totals(settings: LocalSettings, level: IsolationLevel) -> TotalsPlan:
    """Return which limits the control group and the watcher enforce. Raises ConfigurationError if neither can."""
    if settings.disk_mib is not None and level != "bubblewrap":
        raise ConfigurationError(
            f"`disk_mib` is {settings.disk_mib}, and needs isolation bubblewrap or the provider container: use one of "
            "them, or leave `disk_mib` out"
        )
    controllers = find_parent().controllers
    if settings.cpus is not None and "cpu" not in controllers:
        raise ConfigurationError(
            f"`cpus` is {settings.cpus:g}, and needs control groups of version 2 with the cpu controller, which this "
            "process cannot create: run it with systemd-run --user -p Delegate=yes, or leave `cpus` out"
        )
    grouped: dict[str, float] = {}
    watched: dict[str, int] = {}
    if settings.cpus is not None:
        grouped["cpu"] = settings.cpus
    if settings.total_memory_mib is not None:
        if "memory" in controllers:
            grouped["memory"] = settings.total_memory_mib * MIB
        else:
            watched["total_memory_mib"] = settings.total_memory_mib
    if has_own_count(level):
        return TotalsPlan(grouped, watched)  # RLIMIT_NPROC already limits the whole sandbox.
    if settings.total_processes is not None:
        if "pids" in controllers:
            grouped["pids"] = settings.total_processes
        else:
            watched["total_processes"] = settings.total_processes
    elif level == "landlock":
        # RLIMIT_NPROC also counts the user's other processes. When they end, it lets the code start more than
        # `processes`, so the watcher counts too.
        watched["processes"] = settings.processes
    return TotalsPlan(grouped, watched)
