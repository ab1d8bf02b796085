"""The settings of Modal sandboxes."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from ..settings import SnapshotSettings

TOKEN_SETTINGS = ("token_id", "token_secret")
PYTHON = "3.12"  # version in the default image. Without it, Modal would use the host's version.


class ModalAccountSettings(BaseModel):
    """The account."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)  # The input has secrets.

    token_id: SecretStr | None = Field(
        default=None, title="Token id", description="Id of an API token; by default that in Modal's own configuration."
    )
    token_secret: SecretStr | None = Field(default=None, title="Token secret", description="Secret of the API token.")


class ModalSettings(ModalAccountSettings, SnapshotSettings):
    """The account, app, image, resources, network and lifetime of sandboxes."""

    account_settings: ClassVar[tuple[str, ...]] = TOKEN_SETTINGS

    app_name: str = Field(
        default="rlm-batch",
        title="App",
        pattern=r"^[A-Za-z0-9._-]{1,63}$",
        description="App, created on first use. It is the Modal app that the sandboxes belong to.",
    )
    image: str | None = Field(
        default=None,
        title="Image",
        description="Image with Python. It must be public and have Python 3.9 or newer as `python`, such as "
        f"python:3.13-slim. By default it is Debian with Python {PYTHON}.",
    )
    cpu: float | None = Field(
        default=None,
        gt=0,
        title="CPU",
        description="Cores of each sandbox. Modal reserves these at least. The default is Modal's, an eighth of a "
        "core.",
    )
    memory_mib: int | None = Field(
        default=None,
        ge=128,
        title="Memory",
        description="MiB of memory of the whole sandbox. Modal reserves it, and it also limits the address space of "
        "each process. The default is Modal's, without a limit.",
    )
    gpu: str | None = Field(default=None, title="GPU", description="GPU, such as T4 or H100:2.")
    region: str | None = Field(default=None, title="Region", description="Region, such as us-east or eu.")
    block_network: bool = Field(default=False, title="Block network", description="Block all network access.")
    allowed_domains: list[str] | None = Field(
        default=None,
        title="Allowed domains",
        description="Domains that code may reach. All others are blocked. *.example.org covers all names below it.",
    )
    allowed_cidrs: list[str] | None = Field(
        default=None,
        title="Allowed addresses",
        description="Address ranges that code may reach. All others are blocked.",
    )
    workdir: str = Field(
        default="/sandbox",
        title="Directory",
        pattern="^/.",
        description="Directory of the code. A repository is cloned to it.",
    )
    lifetime: int = Field(
        default=14_400,
        ge=10,
        le=86_400,
        title="Lifetime",
        description="Seconds before the provider deletes the sandbox, even if the host is gone. Every execution must "
        "be shorter. At most 24 hours are possible.",
    )
    idle_timeout: int = Field(
        default=60,
        ge=1,
        title="Idle timeout",
        description="Seconds to live without a driver. Then Modal ends the sandbox. The driver ends 90 s after the "
        "host falls silent.",
    )
    start_timeout: int = Field(
        default=600,
        ge=1,
        title="Start timeout",
        description="Seconds that a sandbox may take to start. Modal may have to look for a machine.",
    )
