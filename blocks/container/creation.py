"""The creation of a container: its name, volume, payload and driver settings."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...sandbox.confinement.policy import LATEST_ABI, MACHINES, Policy
from ...sandbox.driver_bundle import pack_driver
from ...sandbox.driver_settings import KEEP_SECONDS, DriverSettings
from ...sandbox.errors import ConfigurationError
from ..host_files.cache import check_out_repository
from ..host_files.files import HostFiles
from ..host_files.mounts import HostMount, resolve_volume_mount
from ..host_files.source_tree import check_open_to_others
from ..storage.local_volume import UMASK, LocalVolume, find_volume
from ..worker_consent import check_network, check_runtime
from .command import SYSTEM_DIRECTORIES, build_bind, build_run_command
from .deletion import make_name
from .engine import Engine
from .handle import ContainerHandle
from .launch import CWD, Payload, pack_repository
from .probe import Readiness, ensure_ready
from .settings import ContainerSettings

# This policy closes two gaps. Podman's filter lets code create a user namespace, in which it has every capability. And
# no network namespace confines the sockets that lead to a virtual machine's host (AF_VSOCK).
CODE_POLICY = Policy(readable=(), writable=(), network=True, own_mounts=True, own_uid=True, abi=LATEST_ABI)


async def create_container(
    settings: ContainerSettings,
    engine: Engine,
    labels: dict[str, str],
    commit: str | None,
    files: HostFiles,
    *,
    can_stay: bool = False,
) -> ContainerHandle:
    """Create a container. It starts when its driver is connected. Raise ConfigurationError or SandboxStartError.

    If it `can_stay`, a signal to its driver keeps it open without a connection.
    """
    check_consent(settings)
    check_mounts(files.mounts, engine)
    binds = {mount.target: build_bind(str(mount.source), mount.target) for mount in files.mounts}
    volume, volume_mount = None, None
    if settings.volume_name is not None:
        volume, volume_mount = _locate_volume(settings, engine, settings.volume_name)
        binds[volume_mount] = build_bind(os.path.realpath(volume.path), volume_mount, is_writable=True)
    ready = await ensure_ready(settings, engine, labels)
    repository = None
    if settings.repo_url is not None:
        repository = await pack_repository(
            await check_out_repository(settings.repo_url, commit or "", settings.repo_token)
        )
    gid = None if volume is None else volume.create()
    payload = Payload(pack_driver(ready.python), files.archive, repository)
    name = make_name()
    command = build_run_command(
        engine,
        settings,
        ready.image,
        payload.build_boot_program(settings.start_timeout),
        labels=labels,
        name=name,
        image_volumes=ready.image_volumes,
        binds=binds,
        gid=gid,
    )
    driver_settings = DriverSettings(
        cwd=CWD,
        volume=volume_mount,
        environment=settings.build_host_environment(CWD, "/tmp"),
        python_path=files.list_uploaded_directories(),
        executable=files.find_uploaded_python(),
        lifetime=settings.lifetime,
        stay_seconds=KEEP_SECONDS if can_stay else None,
        confinement=_build_confinement(settings, files, ready, gid),
    )
    return ContainerHandle(settings, engine, name, ready.layers, driver_settings, command, payload, volume)


def _locate_volume(settings: ContainerSettings, engine: Engine, name: str) -> tuple[LocalVolume, str]:
    """Return the volume and its path in the container. Raise ConfigurationError."""
    volume = find_volume(settings.volume_root, name)
    if engine.is_rootless and engine.name == "docker":
        raise ConfigurationError(
            "volumes do not work with a rootless Docker, whose code runs as another user: use Podman, or Docker with "
            "root's rights"
        )
    return volume, resolve_volume_mount(settings.volume_mount_path, SYSTEM_DIRECTORIES)


def _build_confinement(
    settings: ContainerSettings, files: HostFiles, ready: Readiness, gid: int | None
) -> dict[str, Any]:
    """Return the driver's rules for confining code, in addition to the container's own."""
    # An allocation beyond this limit raises MemoryError. The container's own limit would kill the process.
    rules: dict[str, Any] = {"limits": {"CORE": 0, "DATA": settings.memory_mib << 20}}
    if gid is not None:
        rules["umask"] = UMASK
    if ready.is_host_kernel:  # The driver compares the mounts before code runs, because a link may have changed.
        rules["mounts"] = [[mount.target, mount.device, mount.inode, 0] for mount in files.mounts]
    if ready.machine in MACHINES:
        has_mounted_directory = any(mount.is_directory for mount in files.mounts)
        policy = replace(CODE_POLICY, unix_sockets=not has_mounted_directory)
        rules["seccomp"] = policy.build_seccomp_filter(ready.machine)
    return rules


def check_mounts(mounts: Sequence[HostMount], engine: Engine) -> None:
    """Check that the engine's containers can mount these files. Raise ConfigurationError."""
    for mount in mounts:
        if not engine.is_local:
            raise ConfigurationError(
                f"mounts: {engine.name} runs containers on another machine, without {mount.source}: put "
                "the data on a volume, or use the provider local"
            )
        if mount.other_file_system:
            raise ConfigurationError(
                f"mounts: {mount.source} contains another file system ({mount.other_file_system}), which "
                "containers do not see: mount that separately"
            )
        mount.check_source()
        if os.geteuid() == 0:
            check_open_to_others("mounts", mount.source)


def check_consent(settings: ContainerSettings) -> None:
    """Check that this process may run containers with that network and runtime. Raise ConfigurationError."""
    if settings.network:
        check_network("network")
    if settings.runtime is not None:
        check_runtime(settings.runtime)
