"""The settings of the local provider, in plain pydantic for Prefect blocks and scripts."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from ..settings import ENVIRONMENT, SandboxFields, SandboxSettings, check_wheel_requirements

MAX_MIB = 1 << 40  # The kernel takes a limit as a signed 64-bit number of bytes.


class LocalSettings(SandboxSettings):
    """The settings of sandboxes on this machine: their isolation, their limits and the directory of volumes."""

    # A run names its isolation in its provider ("local:none").
    block_only: ClassVar[tuple[str, ...]] = (*SandboxSettings.block_only, "isolation")
    takes_environment: ClassVar[bool] = True

    isolation: Literal["auto", "bubblewrap", "landlock", "none"] = Field(
        default="auto",
        title="Isolation",
        description="auto takes the strongest that works here: bubblewrap, then landlock, and refuses where neither "
        "does. none runs code with no isolation.",
    )
    memory_mib: int = Field(
        default=4096,
        ge=64,
        title="Memory",
        description="MiB of address space for each process of the code; numerical libraries want a few thousand.",
    )
    processes: int = Field(
        default=128, ge=1, title="Processes", description="Processes and threads that the code may have at one time."
    )
    file_size_mib: int = Field(
        default=1024, ge=1, title="File size", description="MiB that one file written by the code may have."
    )
    open_files: int = Field(
        default=1024,
        ge=32,
        title="Open files",
        description="Files that each process of the code may have open; 1024 is what most programs expect.",
    )
    cpu_seconds: int | None = Field(
        default=None,
        ge=1,
        title="CPU seconds",
        description="CPU seconds for each process of the code; by default what all processors can do in an "
        "execution's timeout.",
    )
    total_memory_mib: int | None = Field(
        default=None,
        ge=64,
        title="Total memory",
        description="MiB of memory for the sandbox as a whole, files in memory included; unlimited by default, for "
        "what is right depends on how many sandboxes there are.",
    )
    total_processes: int | None = Field(
        default=None,
        ge=8,
        title="Total processes",
        description="Processes and threads of the sandbox as a whole; by default as many as the code may have.",
    )
    disk_mib: int | None = Field(
        default=None,
        ge=1,
        title="Disk",
        description="MiB that the files in the sandbox's own folders may take together; unlimited by default, and "
        "looked at every half second.",
    )
    cpus: float | None = Field(
        default=None,
        ge=0.01,
        allow_inf_nan=False,
        title="Processors",
        description="Processors that the sandbox as a whole may keep busy, such as 0.5; unlimited by default, and only "
        "where there are control groups that may be used.",
    )
    volume_root: str | None = Field(
        default=None,
        title="Volumes",
        description="The directory that local volumes are in; by default RLM_BATCH_VOLUMES, or one below the user's "
        "data directory.",
    )

    # A bound of the fields would change the checksum of the block's schema, by which Prefect finds saved blocks.
    @field_validator("memory_mib", "file_size_mib")
    @classmethod
    def _check_size(cls, mib: int) -> int:
        if mib > MAX_MIB:
            raise ValueError(f"{mib:,} MiB are more than a system can count: it is {MAX_MIB:,} at most")
        return mib

    @property
    def has_environment_packages(self) -> bool:
        """Return whether sandboxes use the running environment's packages instead of installed ones."""
        return self.packages == [ENVIRONMENT]

    @field_validator("packages")
    @classmethod
    def _check_wheels(cls, packages: list[str]) -> list[str]:
        check_wheel_requirements(packages)
        return packages


class LocalFields(SandboxFields, total=False):
    """The fields of `LocalSettings` as keywords of `LocalSandbox` and `LocalInterpreter`, for type checkers."""

    packages: list[str] | tuple[str, ...] | Literal["environment"]
    isolation: Literal["auto", "bubblewrap", "landlock", "none"]
    memory_mib: int
    processes: int
    file_size_mib: int
    open_files: int
    cpu_seconds: int | None
    total_memory_mib: int | None
    total_processes: int | None
    disk_mib: int | None
    cpus: float | None
    volume_root: str | None
