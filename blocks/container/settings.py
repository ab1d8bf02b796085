"""The settings of containers, as a pydantic model for both Prefect blocks and scripts."""

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from ..settings import MAX_MIB, SandboxSettings, SetupSettings, VolumeRoot

DEFAULT_IMAGE = "docker.io/library/python:3.12-slim"
REFERENCE = re.compile(
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+(?=/))?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
# Podman reads these words before a colon as a transport, and not as part of an image's name.
TRANSPORTS = (
    "atomic", "containers-storage", "dir", "docker", "docker-archive", "docker-daemon", "oci", "oci-archive", "ostree",
    "sif", "tarball",
)  # fmt: skip


class ContainerSettings(SetupSettings):
    """The engine, the image, and the limits of a sandbox as a whole."""

    block_only: ClassVar[tuple[str, ...]] = (*SandboxSettings.block_only, "engine", "runtime")
    takes_wheels_only: ClassVar[bool] = True

    engine: Literal["auto", "podman", "docker"] = Field(
        default="auto",
        title="Engine",
        description="Container engine: podman, docker, or auto for the first that answers, Podman before Docker.",
    )
    image: str = Field(
        default=DEFAULT_IMAGE,
        title="Image",
        description="Image with Python. It needs Python 3.9 or newer as `python3`. The engine pulls a missing image "
        "from its registry.",
    )
    runtime: str | None = Field(
        default=None,
        title="Runtime",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="OCI runtime by its name in the engine, such as runsc for gVisor; by default the engine's own.",
    )
    memory_mib: int = Field(
        default=2048,
        ge=64,
        le=MAX_MIB,
        title="Memory",
        description="MiB of memory of the whole sandbox. Its files count, and there is no swap.",
    )
    processes: int = Field(
        default=256,
        ge=8,
        le=4096,
        title="Processes",
        description="Processes and threads. The limit is for the whole sandbox with its driver.",
    )
    cpus: float | None = Field(
        default=None,
        ge=0.01,
        allow_inf_nan=False,
        title="Processors",
        description="Processors to use, such as 0.5. By default there is no limit. The limit is for the whole sandbox.",
    )
    disk_mib: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MIB,
        title="Disk",
        description="MiB of all files in the sandbox. The default is half of its memory, which holds the files. A "
        "cloned repository counts.",
    )
    network: bool = Field(
        default=False,
        title="Network",
        description="Give code the engine's default network. A deployment's run needs its worker's consent.",
    )
    volume_root: VolumeRoot = None

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str) -> str:
        transport, colon, _ = image.partition(":")
        if REFERENCE.fullmatch(image) is None or (colon and transport in TRANSPORTS):
            raise ValueError(
                f"{image!r} is not the name of an image: use one such as docker.io/library/python:3.13-slim"
            )
        return image

    @property
    def disk_limit_mib(self) -> int:
        """Return the MiB that all files of a sandbox may take together."""
        return self.memory_mib // 2 if self.disk_mib is None else self.disk_mib
