"""Control groups: where this process may create them, and one group per sandbox with its limits."""

import errno
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

GROUP_PREFIX = "rlm-batch-"  # A group has its sandbox's id as its name.
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000  # microseconds; the kernel's default period for CPU quotas
ROUND_SECONDS = 0.01
MAKE_TRIES = 10  # attempts, because a starting process may remove a new group as a leftover
REMOVE_SECONDS = 1.0  # time for killed processes to leave their group
MIB = 1024 * 1024
# Errors for a group that is being removed: from opening one of its files, from using an open file, and from mkdir.
VANISHED = (errno.ENOENT, errno.ENODEV, errno.EEXIST)


@dataclass(frozen=True)
class Parent:
    """A group in which this process may create groups, and the version of its hierarchy."""

    path: Path
    version: int


@cache
def find_parents() -> dict[str, Parent]:
    """Return, by controller, the group in which this process can create groups. Unusable controllers are missing.

    The test creates a group, once per process. It also removes the empty groups of killed processes.
    """
    parents: dict[str, Parent] = {}
    if not os.path.exists("/proc/thread-self/children"):
        return parents  # `_move` needs this file to find bubblewrap's child.
    for controller, own, top, version in _list_hierarchies():
        candidates = [own] if version == 1 else list_delegated(own, top)
        for path in candidates:
            names = [controller] if version == 1 else enable_controllers(path)
            found = {name: Parent(path, version) for name in names if _can_hold_group(path, name, version)}
            if found:
                _remove_empty_groups(path)
                parents = {**found, **parents}
                break
    return parents


def _list_hierarchies() -> Iterator[tuple[str, Path, Path, int]]:
    """Yield each mounted hierarchy: controller (empty for version 2), this process's group, top, version."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        names = [""] if kind == "cgroup2" else [name for name in CONTROLLERS if name in options.split(",")]
        for name in names if kind in ("cgroup", "cgroup2") else ():
            own = groups.get(name)
            if own is not None and (root == "/" or own == root or own.startswith(root + "/")):
                inside = own if root == "/" else own.removeprefix(root)
                yield name, Path(mount + inside), Path(mount), 2 if kind == "cgroup2" else 1


def list_delegated(own: Path, top: Path) -> list[Path]:
    """Return this process's group and its ancestors, up to the first group that this process may not change."""
    found: list[Path] = []
    for path in (own, *own.parents):
        if not (os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)):
            break
        found.append(path)
        if path == top:
            break
    return found


def enable_controllers(path: Path) -> list[str]:
    """Enable a version 2 group's controllers for the groups below it, and return those that are enabled.

    The kernel refuses this if the group itself has processes. The group above may still work.
    """
    with suppress(OSError):
        for name in CONTROLLERS:
            enabled = (path / "cgroup.subtree_control").read_text().split()
            if name not in enabled and name in (path / "cgroup.controllers").read_text().split():
                (path / "cgroup.subtree_control").write_text(f"+{name}")
    with suppress(OSError):
        return [name for name in CONTROLLERS if name in (path / "cgroup.subtree_control").read_text().split()]
    return []


def _can_hold_group(parent: Path, controller: str, version: int) -> bool:
    group = parent / f"probe-of-{GROUP_PREFIX}{uuid.uuid4().hex[:12]}"  # not a sandbox's name
    try:
        group.mkdir()
    except OSError:
        return False
    name = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us"}.get(controller, f"{controller}.max")
    is_usable = os.access(group / (f"{controller}.max" if version == 2 else name), os.W_OK)
    with suppress(OSError):
        group.rmdir()
    return is_usable


def _remove_empty_groups(parent: Path) -> None:
    """Remove the groups of ended sandboxes. If a group is new, its live host creates it again."""
    for group in parent.glob(GROUP_PREFIX + "*"):
        with suppress(OSError):  # The kernel refuses for a group with processes.
            group.rmdir()


def build_group(name: str, limits: dict[str, float]) -> "SandboxGroup":
    """Return a sandbox's group without creating it. `limits` has bytes, processes or processors by controller."""
    group = SandboxGroup()
    for controller, limit in limits.items():
        parent = find_parents()[controller]
        files: dict[str, int | str]
        if parent.version == 1:
            memory = {"memory.limit_in_bytes": int(limit), "memory.memsw.limit_in_bytes": int(limit)}
            cpu = {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": int(limit * PERIOD_US)}
        else:
            memory = {"memory.max": int(limit), "memory.swap.max": 0}
            cpu = {"cpu.max": f"{int(limit * PERIOD_US)} {PERIOD_US}"}
        files = {"memory": memory, "pids": {"pids.max": int(limit)}, "cpu": cpu}[controller]  # type: ignore[assignment]
        group.directories.setdefault(parent.path / name, {}).update(files)
    return group


@dataclass
class SandboxGroup:
    """A sandbox's group: its directory in each hierarchy, with the limits by file name."""

    directories: dict[Path, dict[str, int | str]] = field(default_factory=dict[Path, dict[str, int | str]])
    _memory_kills: int = 0

    def create(self) -> None:
        """Create the group with its limits. Raises OSError."""
        for directory, limits in self.directories.items():
            _make(directory, limits)

    def add(self, pid: int) -> None:
        """Move a process and its descendants into the group. Raises OSError.

        The first move after a pause takes about 10 ms, because the kernel waits for all processors.
        """
        for directory, limits in self.directories.items():
            for tries_left in reversed(range(MAKE_TRIES)):
                try:
                    _move(pid, directory)
                    break
                except OSError as error:
                    if error.errno not in VANISHED or not tries_left:
                        raise
                    _make(directory, limits)

    def has_new_memory_kill(self) -> bool:
        """Return whether the kernel has killed a process of this group for lack of memory since the last call."""
        before, self._memory_kills = self._memory_kills, self._count_memory_kills()
        return self._memory_kills > before

    def _count_memory_kills(self) -> int:
        for directory in self.directories:
            for name in ("memory.oom_control", "memory.events"):
                with suppress(OSError):
                    lines = (line.split() for line in (directory / name).read_text().splitlines())
                    return next((int(words[1]) for words in lines if words[0] == "oom_kill"), 0)
        return 0

    def remove(self) -> None:
        """Kill the group's processes and remove it. A missing group is not an error."""
        remove_groups([str(directory) for directory in self.directories])


def _make(directory: Path, limits: dict[str, int | str]) -> None:
    for tries_left in reversed(range(MAKE_TRIES)):
        try:
            directory.mkdir(exist_ok=True)
            for name, value in limits.items():
                # A kernel that does not account for swap has no files for swap limits.
                if "sw" not in name or (directory / name).exists():
                    (directory / name).write_text(str(value))
            return
        except OSError as error:
            if error.errno not in VANISHED or not tries_left:
                raise


def _move(pid: int, directory: Path) -> None:
    moving = [pid]
    for process in moving:
        try:
            (directory / "cgroup.procs").write_text(str(process))
        except ProcessLookupError:
            if process == pid:
                raise
        # Children that start after the move are in the group. This loop finds the earlier children.
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                moving += map(int, task.read_text().split())


def try_remove_groups(directories: list[str]) -> bool:
    """Remove empty groups, and return whether all are removed."""
    for directory in directories:
        with suppress(FileNotFoundError):
            try:
                os.rmdir(directory)
            except OSError:
                return False
    return True


def remove_groups(directories: list[str]) -> None:
    """Kill the processes in these groups and remove them. A group with a surviving process stays."""
    until = time.monotonic() + REMOVE_SECONDS
    while not try_remove_groups(directories) and time.monotonic() < until:
        for directory in directories:
            with suppress(OSError):
                (Path(directory) / "cgroup.kill").write_text("1")
            with suppress(OSError):
                for pid in (Path(directory) / "cgroup.procs").read_text().split():
                    with suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
        time.sleep(ROUND_SECONDS)
