"""The settings of the local provider, in plain pydantic for Prefect blocks and scripts."""

from typing import ClassVar, Literal

from pydantic import Field

from ..settings import ENVIRONMENT, MAX_MIB, SandboxSettings, VolumeRoot


class LocalSettings(SandboxSettings):
    """The settings of sandboxes on this machine: their isolation, their limits and the directory of volumes."""

    # A run names its isolation in its provider ("local:none").
    block_only: ClassVar[tuple[str, ...]] = (*SandboxSettings.block_only, "isolation")
    takes_environment: ClassVar[bool] = True
    takes_wheels_only: ClassVar[bool] = True

    isolation: Literal["auto", "bubblewrap", "landlock", "none"] = Field(
        default="auto",
        title="Isolation",
        description="Isolation of the code: bubblewrap, landlock, or auto for the strongest that works here. Where "
        "neither works, auto refuses to run. none runs code without isolation.",
    )
    memory_mib: int = Field(
        default=4096,
        ge=64,
        le=MAX_MIB,
        title="Memory",
        description="MiB of memory of each process. The limit is on its address space; numerical libraries need a few "
        "thousand.",
    )
    processes: int = Field(
        default=128,
        ge=1,
        title="Processes",
        description="Processes and threads. Only those of the code count.",
    )
    file_size_mib: int = Field(
        default=1024, ge=1, le=MAX_MIB, title="File size", description="MiB of each file that code writes."
    )
    open_files: int = Field(
        default=1024,
        ge=32,
        title="Open files",
        description="Open files of each process. Most programs expect 1024.",
    )
    cpu_seconds: int | None = Field(
        default=None,
        ge=1,
        title="CPU seconds",
        description="Seconds of CPU time for each process. The default is what all processors can do in an execution's "
        "timeout.",
    )
    total_memory_mib: int | None = Field(
        default=None,
        ge=64,
        le=MAX_MIB,
        title="Total memory",
        description="MiB of memory of the sandbox's processes together. By default there is no limit. Files in memory "
        "count. The right value depends on the number of sandboxes.",
    )
    total_processes: int | None = Field(
        default=None,
        ge=8,
        title="Total processes",
        description="Processes and threads of the sandbox together. The default is as many as the code may have.",
    )
    disk_mib: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MIB,
        title="Disk",
        description="MiB of all files in the sandbox, which are then in memory. By default there is no limit, and "
        "files are on disk. Needs isolation bubblewrap.",
    )
    cpus: float | None = Field(
        default=None,
        ge=0.01,
        allow_inf_nan=False,
        title="Processors",
        description="Processors to use, such as 0.5. By default there is no limit. The limit is for the whole sandbox "
        "and needs control groups of version 2 that this user may change.",
    )
    volume_root: VolumeRoot = None

    @property
    def has_environment_packages(self) -> bool:
        """Return whether sandboxes use the running environment's packages instead of installed ones."""
        return self.packages == [ENVIRONMENT]
