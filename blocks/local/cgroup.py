"""Control groups of version 2: where this process may create them, and one group per sandbox with its limits."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000  # microseconds; the kernel's default period for CPU quotas
REMOVE_SECONDS = 1.0  # time for killed processes to leave their group
ROUND_SECONDS = 0.01
MIB = 1024 * 1024


@dataclass(frozen=True)
class Parent:
    """A group below which this process may create groups, and the controllers that can limit those."""

    path: Path
    controllers: tuple[str, ...]


@cache
def find_parent(top: Path = Path("/sys/fs/cgroup")) -> Parent:
    """Return the nearest group below which this process can limit groups: its own group, or one above.

    Args:
        top: Where the hierarchy is mounted. Without a usable group, the result is this path without controllers.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines() if os.path.exists("/proc/self/cgroup") else []
    own = next((top / line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    # `SandboxGroup.add` needs this file.
    if own is not None and os.path.exists("/proc/thread-self/children"):
        for path in (own, *own.parents):
            if not (os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)):
                break
            if controllers := _enable_controllers(path):
                return Parent(path, controllers)
            if path == top:
                break
    return Parent(top, ())


def _enable_controllers(path: Path) -> tuple[str, ...]:
    """Enable a group's controllers for the groups below it, and return those that are enabled.

    The kernel refuses this if the group itself has processes. The group above may still work.
    """
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
    """A sandbox's group: its directory, and its limits in bytes, processes or processors by controller.

    Without limits there is no group, and the methods do nothing.
    """

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
        """Move a process and its descendants into the group. Raises OSError.

        The first move after a pause takes about 10 ms, because the kernel waits for all processors.
        """
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
