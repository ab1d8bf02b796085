"""The command line that runs a container with its limits, both for sandboxes and for the probe of an image."""

import os
import re
import resource
from collections.abc import Iterable, Mapping, Sequence

from ...sandbox.errors import ConfigurationError
from ..settings import START_ENVIRONMENT
from .engine import Engine
from .settings import ContainerSettings

OPEN_FILES = 4096  # per process
MOST_PROCESSES = 4096  # per user; Podman without privileges cannot set a much higher limit
FIRST_UID = 0x5B000000  # first of the user ids for code if the host is root, far from the ids that systems assign
NOBODY = 65534  # the user id for rootless Docker, whose root is an unprivileged user of this machine
# Directories that a container needs itself.
SYSTEM_DIRECTORIES = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/tmp")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")


def build_bind(source: str, target: str, *, is_writable: bool = False) -> str:
    """Return the mount option for a directory or file of this machine. Raise ConfigurationError."""
    for path in (source, target):
        if re.search(r'[\x00-\x1f\x7f,"]', path):  # Engines parse the option as a line of CSV.
            raise ConfigurationError(
                f"{path!r} has a comma, a quotation mark or a control character, and an engine cannot mount it: use "
                "another path"
            )
    option = f"type=bind,source={source},target={target}"
    # A read-only bind has no nested mounts, because engines leave those writable.
    return option if is_writable else f"{option},readonly,bind-nonrecursive"


def build_run_command(
    engine: Engine,
    settings: ContainerSettings,
    image: str,
    program: str,
    *,
    labels: Mapping[str, str],
    name: str,
    image_volumes: Sequence[str] = (),
    binds: Mapping[str, str] | None = None,
    gid: int | None = None,
) -> list[str]:
    """Build the command that runs `program`, a Python program, in a container that is removed when it ends.

    `binds` has mount options by their paths in the container. `gid` is the group that owns the volume.
    """
    binds = binds or {}
    words = [engine.program, "run", "--interactive", "--rm", "--pull", "never", "--log-driver", "none"]
    words += ["--name", name]
    words += repeat_option("--label", [f"{label}={value}" for label, value in labels.items()])
    words += ["--hostname", "sandbox", "--workdir", "/tmp", "--entrypoint", "python3", "--init=false"]
    words += ["--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    if not settings.network:
        words += ["--network", "none"]
    if settings.runtime is not None:
        words += ["--runtime", settings.runtime]
    words += _build_limits(settings)
    words += build_ulimits(engine)
    words += _build_user(engine, gid)
    words += repeat_option("--env", [f"{name}={value}" for name, value in START_ENVIRONMENT.items()])
    if engine.name == "podman":
        words += ["--read-only-tmpfs=false", "--http-proxy=false"]
    else:  # Docker's client passes on the proxies of its configuration, including their passwords.
        words += repeat_option("--env", [f"{name}=" for name in PROXY_VARIABLES])
        words += repeat_option("--env", [f"{name.lower()}=" for name in PROXY_VARIABLES])
    for path in image_volumes:
        if os.path.normpath(path) not in ("/tmp", "/dev/shm", *binds):  # Only one mount is possible at a path.
            words += ["--tmpfs", f"{path}:ro,size=64k"]
    words += repeat_option("--mount", binds.values())
    if binds:
        # With SELinux, a container may only read files of its label, and new labels would change the user's files.
        words += ["--security-opt", "label=disable"]
    return [*words, image, "-u", "-c", program]


def repeat_option(option: str, values: Iterable[str]) -> list[str]:
    """Return the option before each value."""
    words: list[str] = []
    for value in values:
        words += [option, value]
    return words


def _build_limits(settings: ContainerSettings) -> list[str]:
    """Return the limits of the container as a whole."""
    memory = f"{settings.memory_mib}m"
    words = ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(settings.processes)]
    if settings.cpus is not None:
        words += ["--cpus", f"{settings.cpus:g}"]
    # Files in /dev/shm remain when the code that wrote them is killed. Together with the files in /tmp they must leave
    # half of the free memory.
    free_mib = min(settings.memory_mib - settings.disk_limit_mib, settings.memory_mib // 2)
    shm_mib = max(1, free_mib // 2)
    options = "rw,exec,nosuid,nodev,mode=1777"
    words += ["--tmpfs", f"/tmp:{options},size={settings.disk_limit_mib}m"]
    words += ["--tmpfs", f"/dev/shm:{options},size={shm_mib}m"]
    return words


def build_ulimits(engine: Engine) -> list[str]:
    """Return the limits of each process. An unprivileged process cannot set Podman's defaults, which are higher."""
    limits = {"core": 0, "nofile": OPEN_FILES}
    if engine.name == "podman":
        limits["nproc"] = MOST_PROCESSES
        if engine.is_local:
            limits["nofile"] = _lower_to_hard_limit(OPEN_FILES, resource.RLIMIT_NOFILE)
            limits["nproc"] = _lower_to_hard_limit(MOST_PROCESSES, resource.RLIMIT_NPROC)
    return repeat_option("--ulimit", [f"{name}={number}:{number}" for name, number in limits.items()])


def _lower_to_hard_limit(number: int, kind: int) -> int:
    """Return the number, or this process's hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    return number if hard == resource.RLIM_INFINITY else min(number, hard)


def _build_user(engine: Engine, gid: int | None) -> list[str]:
    """Return the options for the user that code runs as, which is never root.

    Code usually runs as this process's user, who can write the volumes.
    """
    if engine.is_rootless and engine.name == "podman":
        return ["--userns", "keep-id"]
    if engine.is_rootless:
        return ["--user", f"{NOBODY}:{NOBODY}"]
    if os.geteuid() != 0:
        return ["--user", f"{os.geteuid()}:{os.getegid()}"]
    # Each container of root's has another user, because the kernel counts some limits by user.
    uid = FIRST_UID + int.from_bytes(os.urandom(3), "big")
    return ["--user", f"{uid}:{uid if gid is None else gid}"]
