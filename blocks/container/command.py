"""The command line that runs a container with its limits, both for sandboxes and for the probe of an image."""

import os
import re
import resource
from collections.abc import Mapping, Sequence

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
    """Return the mount option for a directory or file of this machine. Raise ConfigurationError.

    A read-only bind has no nested mounts, because engines leave those writable.
    """
    for path in (source, target):
        if re.search(r'[\x00-\x1f\x7f,"]', path):  # Engines parse the option as a line of CSV.
            raise ConfigurationError(
                f"{path!r} has a comma, a quotation mark or a control character, and an engine cannot mount it: use "
                "another path"
            )
    return f"type=bind,source={source},target={target}{'' if is_writable else ',readonly,bind-nonrecursive'}"


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

    `binds` has mount options by their paths in the container.
    """
    binds = binds or {}
    memory = f"{settings.memory_mib}m"
    # Files in /dev/shm remain when the code that wrote them is killed. Together with the other files they must leave
    # some memory free.
    shm_mib = max(1, min(settings.memory_mib - settings.disk_limit_mib, settings.memory_mib // 2) // 2)
    mounted = {"/tmp", "/dev/shm", *binds}  # Only one mount is possible at a path.
    tmpfs = "rw,exec,nosuid,nodev,mode=1777"
    words = [engine.program, "run", "--interactive", "--rm", "--pull", "never", "--log-driver", "none"]
    words += ["--name", name]
    words += [word for label, value in labels.items() for word in ("--label", f"{label}={value}")]
    words += ["--hostname", "sandbox", "--workdir", "/tmp", "--entrypoint", "python3", "--init=false"]
    words += ["--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    words += [] if settings.network else ["--network", "none"]
    words += [] if settings.runtime is None else ["--runtime", settings.runtime]
    words += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(settings.processes)]
    words += [] if settings.cpus is None else ["--cpus", f"{settings.cpus:g}"]
    words += ["--tmpfs", f"/tmp:{tmpfs},size={settings.disk_limit_mib}m"]
    words += ["--tmpfs", f"/dev/shm:{tmpfs},size={shm_mib}m"]
    words += [
        word
        for path in image_volumes
        if os.path.normpath(path) not in mounted
        for word in ("--tmpfs", f"{path}:ro,size=64k")
    ]
    words += build_ulimits(engine)
    words += _build_user(engine, gid)
    if engine.name == "podman":
        words += ["--read-only-tmpfs=false", "--http-proxy=false"]
    else:  # Docker's client passes on the proxies of its configuration, including their passwords.
        words += [word for name in PROXY_VARIABLES for word in ("--env", f"{name}=", "--env", f"{name.lower()}=")]
    words += [word for name, value in START_ENVIRONMENT.items() for word in ("--env", f"{name}={value}")]
    words += [word for bind in binds.values() for word in ("--mount", bind)]
    if binds:
        # With SELinux, a container may only read files of its label, and new labels would change the user's files.
        words += ["--security-opt", "label=disable"]
    return [*words, image, "-u", "-c", program]


def build_ulimits(engine: Engine) -> list[str]:
    """Return the limits of each process. An unprivileged process cannot set Podman's defaults, which are higher."""
    limits = {"core": 0, "nofile": OPEN_FILES}
    if engine.name == "podman":
        limits["nproc"] = MOST_PROCESSES
        if engine.is_local:
            for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
                hard = resource.getrlimit(kind)[1]
                limits[name] = limits[name] if hard == resource.RLIM_INFINITY else min(limits[name], hard)
    return [word for name, number in limits.items() for word in ("--ulimit", f"{name}={number}:{number}")]


def _build_user(engine: Engine, gid: int | None) -> list[str]:
    """Return the options for the user that code runs as, which is never root.

    The user of this process can write the volumes, so code usually runs as that user. In rootless Docker it runs as
    `NOBODY`. If this process is root, code runs as a new user, because the kernel counts some limits by user. `gid` is
    the group that owns a volume.
    """
    if engine.is_rootless and engine.name == "podman":
        return ["--userns", "keep-id"]
    if engine.is_rootless:
        return ["--user", f"{NOBODY}:{NOBODY}"]
    if os.geteuid():
        return ["--user", f"{os.geteuid()}:{os.getegid()}"]
    uid = FIRST_UID + int.from_bytes(os.urandom(3), "big")
    return ["--user", f"{uid}:{uid if gid is None else gid}"]
