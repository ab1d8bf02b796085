"""The settings of Daytona sandboxes."""

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from ..settings import MountPath, SandboxSettings, SnapshotSettings

DEFAULT_API_URL = "https://app.daytona.io/api"


class DaytonaAccountSettings(BaseModel):
    """The account."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)  # The input has secrets.

    api_key: SecretStr | None = Field(
        default=None, title="API key", description="Key for the API; by default DAYTONA_API_KEY."
    )
    api_url: str | None = Field(
        default=None,
        title="API address",
        description="Address of the API; by default DAYTONA_API_URL, or Daytona's own service.",
    )
    target: str | None = Field(
        default=None,
        title="Region",
        description="Region of the sandboxes. By default it is DAYTONA_TARGET, or the organization's region.",
    )


class DaytonaSettings(DaytonaAccountSettings, SnapshotSettings):
    """The account, the origin of sandboxes, their resources and their network access."""

    account_settings: ClassVar[tuple[str, ...]] = ("api_key", "api_url", "target")
    block_only: ClassVar[tuple[str, ...]] = (*SandboxSettings.block_only, "api_url")

    volume_mount_path: MountPath = "/home/daytona/memory"
    snapshot: str | None = Field(
        default=None, title="Snapshot", description="Snapshot with Python. It needs Python 3.9 or newer."
    )
    image: str | None = Field(
        default=None,
        title="Image",
        description="Image with Python. It needs Python 3.9 or newer. Sandboxes are built from it instead of from a "
        "snapshot.",
    )
    cpu: int | None = Field(
        default=None, ge=1, title="CPUs", description="Cores of each sandbox. The setting needs an image."
    )
    memory: int | None = Field(
        default=None, ge=1, title="Memory", description="GiB of memory of each sandbox. The setting needs an image."
    )
    disk: int | None = Field(
        default=None, ge=1, title="Disk", description="GiB of disk of each sandbox. The setting needs an image."
    )
    network_block_all: bool = Field(default=False, title="No network", description="Block all network access.")
    network_allow_list: str | None = Field(
        default=None,
        title="Allowed networks",
        description="CIDR blocks that code may reach, with commas. By default the account's rules apply.",
    )
    domain_allow_list: str | None = Field(
        default=None, title="Allowed domains", description="Domains that code may reach, with commas."
    )

    snapshot_ttl: int = Field(
        default=604_800,
        ge=3600,
        title="Snapshot lifetime",
        description="Seconds after which `rlm-batch reap` deletes an unused snapshot of a set-up.",
    )
    start_timeout: int = Field(
        default=120,
        ge=1,
        title="Start timeout",
        description="Seconds that a sandbox may take to start. A start that Daytona refuses for now is retried until "
        "then. The first sandbox of a new image takes a minute or more.",
    )

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if self.snapshot is not None and self.image is not None:
            raise ValueError("set either snapshot or image, not both")
        if self.image is None and (self.cpu or self.memory or self.disk):
            raise ValueError(
                "cpu, memory and disk need an image: leave them out, or set image, because a snapshot has its own"
            )
        return self
