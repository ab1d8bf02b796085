"""The limits on a whole sandbox: control groups of version 2 with one group per sandbox, or else the watcher."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...sandbox.errors import ConfigurationError
from .settings import LocalSettings

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000  # microseconds; the kernel's default period for CPU quotas
REMOVE_SECONDS = 1.0  # time for killed processes to leave their group
ROUND_SECONDS = 0.01
MIB = 1024 * 1024


class Parent(NamedTuple):
    """A group below which this process may create groups, and the controllers that can limit those."""

    path: Path
    controllers: tuple[str, ...]


@cache
def find_parent() -> Parent:
    """Return the nearest group below which this process can limit groups: its own, or one above; else the topmost."""
    top = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((top / line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    # `SandboxGroup.add` needs this file.
    if own is not None and os.path.exists("/proc/thread-self/children"):
        for path in (own, *own.parents):
            is_writable = os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)
            if not is_writable or not path.is_relative_to(top):
                break
            if controllers := _enable_controllers(path):
                return Parent(path, controllers)
    return Parent(top, ())


def _enable_controllers(path: Path) -> tuple[str, ...]:
    """Enable controllers for the groups below, unless the group itself has processes, and return the enabled."""
    enabled = path / "cgroup.subtree_control"
    try:
        for name in set(CONTROLLERS).difference(enabled.read_text().split()):
            with suppress(OSError):
                enabled.write_text(f"+{name}")
        return tuple(name for name in CONTROLLERS if name in enabled.read_text().split())
    except OSError:
        return ()


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
        moving = [pid] if self.limits else []
        for process in moving:
            try:
                (self.directory / "cgroup.procs").write_text(str(process))
            except ProcessLookupError:
                if process == pid:
                    raise
            # Children that start after the move are in the group. This loop finds the earlier children.
            for task in Path(f"/proc/{process}/task").glob("*/children"):
                with suppress(OSError):
                    moving += map(int, task.read_text().split())

    def has_new_memory_kill(self) -> bool:
        """Return whether the kernel has killed a process of this group for lack of memory since the last call."""
        before = self._memory_kills
        with suppress(OSError):
            lines = (self.directory / "memory.events").read_text().splitlines() if "memory" in self.limits else []
            self._memory_kills = int(dict(map(str.split, lines)).get("oom_kill", 0))
        return self._memory_kills > before


def try_remove_group(path: str) -> bool:
    """Remove an empty group, and return whether it is gone. An empty path is no group."""
    with suppress(FileNotFoundError):
        try:
            if path:
                os.rmdir(path)
        except OSError:
            return False
    return True


def remove_group(path: str) -> None:
    """Kill the processes in a group and remove it. A group with a surviving process stays."""
    until = time.monotonic() + REMOVE_SECONDS
    while not try_remove_group(path) and time.monotonic() < until:
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
        """Return the names of these limits' isolation layers."""
        return (*(["cgroup-v2"] if self.grouped else []), *(["watcher"] if self.watched else []))


def plan_totals(settings: LocalSettings, level: str) -> TotalsPlan:
    """Return which limits the control group and the watcher enforce. Raises ConfigurationError if neither can."""
    if settings.disk_mib is not None and level != "bubblewrap":
        raise ConfigurationError(
            f"`disk_mib` is {settings.disk_mib}, and needs isolation bubblewrap or the provider container: use one of "
            "them, or leave `disk_mib` out"
        )
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
                f"`cpus` is {limit:g}, and needs control groups of version 2 with the cpu controller, which this "
                "process cannot create: run it with systemd-run --user -p Delegate=yes, or leave `cpus` out"
            )
        else:
            watched["total_memory_mib" if controller == "memory" else "total_processes"] = int(limit)
    if level == "landlock" and not has_own_count(level) and settings.total_processes is None:
        # RLIMIT_NPROC also counts the user's other processes. When they end, it lets the code start more than
        # `processes`, so the watcher counts too.
        watched["processes"] = settings.processes
    return TotalsPlan(grouped, watched)


def has_own_count(level: str) -> bool:
    """Return whether the kernel counts a sandbox's processes separately, by user namespace or by user."""
    return level == "bubblewrap" or (level == "landlock" and os.geteuid() == 0)
