"""The probe of an image: running a container shows which limits and layers are in force on this machine."""

import asyncio
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError
from ...sandbox.process_identity import read_own_identity
from .command import build_run_command
from .deletion import make_name, remove_container
from .engine import Engine, get_last_line
from .image import ensure_image, list_image_volumes
from .settings import ContainerSettings

PROBE_SECONDS = 60.0
# A program that prints what the kernel reports about its container. The last path in each list belongs to cgroups v2,
# the others to v1. In gVisor none of the paths exists.
PROBE = """
import json, os, sys

def read(*paths):
    for path in paths:
        try:
            with open("/sys/fs/cgroup/" + path) as file:
                return file.read().strip()
        except OSError:
            pass
    return ""

def read_status(name):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return line.split()[1]
    return ""

try:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
except OSError:
    boot = ""

print(json.dumps({
    "boot": boot,
    "machine": os.uname().machine,
    "python": list(sys.version_info[:3]),
    "uid": os.getuid(),
    "capabilities": int(read_status("CapBnd") or "0", 16),
    "seccomp": read_status("Seccomp") == "2",
    "limits": {
        "memory_mib": read("memory/memory.limit_in_bytes", "memory.max"),
        "processes": read("pids/pids.max", "pids.max"),
        "cpus": read("cpu/cpu.cfs_quota_us", "cpu,cpuacct/cpu.cfs_quota_us", "cpu.max").split(" ")[0],
    },
}))
"""


@dataclass(frozen=True, slots=True)
class Readiness:
    """An image that runs, and the limits and layers of its containers on this machine."""

    image: str
    image_volumes: tuple[str, ...]
    python: str
    limits: tuple[str, ...]  # the settings that the kernel enforces for the container as a whole
    layers: tuple[str, ...]
    machine: str | None  # architecture of its processes; None if no system call filter is active in it
    is_host_kernel: bool  # False for the kernel of a virtual machine, or one implemented in user space


_ready: dict[tuple[Any, ...], Readiness] = {}
_locks = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


async def ensure_ready(settings: ContainerSettings, engine: Engine, labels: Mapping[str, str]) -> Readiness:
    """Return the limits and layers of the image's containers, after the first call has pulled and probed the image.

    Raise ConfigurationError if the image is not available or its container does not run.
    """
    names = ("image", "runtime", "memory_mib", "processes", "cpus", "disk_limit_mib", "network", "setup")
    values = [getattr(settings, name) for name in names]  # The report of the probe depends on these.
    key = (engine, tuple(settings.packages), *values)
    if key not in _ready:
        async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if key not in _ready:
                image = await ensure_image(settings, engine)
                _ready[key] = await _try_container(settings, engine, image, labels)
    return _ready[key]


async def _try_container(
    settings: ContainerSettings, engine: Engine, image: str, labels: Mapping[str, str]
) -> Readiness:
    """Run the probe in a container of the image. Raise ConfigurationError if code cannot run there as configured."""
    volumes = await list_image_volumes(engine, image)
    report = await _run_probe(settings, engine, image, labels, volumes)
    if tuple(report["python"]) < (3, 9):
        version = ".".join(map(str, report["python"]))
        raise ConfigurationError(f"{image} has Python {version}, and sandboxes need 3.9 or newer: use another image")
    if report["uid"] == 0 or report["capabilities"]:
        raise ConfigurationError(
            f"{engine.name} ran a container as root or with capabilities, against its settings: use "
            "another engine or runtime"
        )
    # The kernel reports bytes of memory, and microseconds of CPU time per 0.1 s.
    wanted = {"memory_mib": settings.memory_mib << 20, "processes": settings.processes}
    if settings.cpus is not None:
        wanted["cpus"] = int(settings.cpus * 100_000)
    limits = [name for name, number in wanted.items() if report["limits"][name] == str(number)]
    layers = ["namespaces", settings.runtime or engine.runtime]
    if report["seccomp"]:
        layers.append("seccomp")
    layers.append("user")
    if limits:
        layers.append(f"cgroup-v{engine.cgroup_version}")
    boot_id = str(report["boot"]).replace("-", "")
    return Readiness(
        image,
        image_volumes=tuple(volumes),
        python=".".join(map(str, report["python"])),
        limits=(*limits, "disk_mib"),
        layers=tuple(layers),
        machine=str(report["machine"]) if report["seccomp"] else None,
        is_host_kernel=bool(boot_id) and read_own_identity().startswith(f"{boot_id}."),
    )


async def _run_probe(
    settings: ContainerSettings, engine: Engine, image: str, labels: Mapping[str, str], volumes: list[str]
) -> dict[str, Any]:
    """Return the report that `PROBE` prints in a container of the image. Raise ConfigurationError."""
    name = make_name()
    command = build_run_command(engine, settings, image, PROBE, labels=labels, name=name, image_volumes=volumes)
    has_succeeded = False
    try:
        done = await engine.run(*command[1:], timeout=PROBE_SECONDS)
        has_succeeded = done.returncode == 0
    finally:
        if not has_succeeded:  # A container that was created but not started is not removed automatically.
            await run_shielded(remove_container(engine, name, name))
    try:
        if not has_succeeded:
            raise ValueError
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        report["python"] = [int(number) for number in report["python"]]
    except (ValueError, LookupError, TypeError):
        complaint = get_last_line(done.stderr) or f"it ended with status {done.returncode}"
        raise ConfigurationError(
            f"{engine.name} cannot run {image}: {complaint}. An image needs Python 3.9 or newer as "
            "python3; see rlm-batch doctor"
        ) from None
    return report
