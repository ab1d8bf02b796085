"""The settings of Modal sandboxes."""

from typing import ClassVar

from pydantic import Field, SecretStr

from ..settings import SandboxFields, SandboxSettings

PYTHON = "3.12"  # version in the default image. Without it, Modal would use the host's version.


class ModalSettings(SandboxSettings):
    """The account, app, image, resources, network and lifetime of sandboxes."""

    account_settings: ClassVar[tuple[str, ...]] = ("token_id", "token_secret")

    token_id: SecretStr | None = Field(
        default=None, title="Token id", description="Of an API token; by default that of Modal's own configuration."
    )
    token_secret: SecretStr | None = Field(
        default=None, title="Token secret", description="It belongs to the token id."
    )
    app_name: str = Field(
        default="rlm-batch",
        title="App",
        pattern=r"^[A-Za-z0-9._-]{1,63}$",
        description="The Modal app that sandboxes belong to, made when it is first asked for.",
    )
    image: str | None = Field(
        default=None,
        title="Image",
        description="A public image with Python 3.9 or newer as `python`, such as python:3.13-slim; by default Debian "
        f"with Python {PYTHON}.",
    )
    cpu: float | None = Field(
        default=None, gt=0, title="CPU", description="Cores that a sandbox has at least; by default Modal's, an eighth."
    )
    memory_mib: int | None = Field(
        default=None,
        ge=128,
        title="Memory",
        description="MiB that a sandbox has, and at most; each process of the code may address as much. By default it "
        "has Modal's, and no limit of its own.",
    )
    gpu: str | None = Field(default=None, title="GPU", description="A kind of GPU, such as T4 or H100:2.")
    region: str | None = Field(default=None, title="Region", description="Where sandboxes run, such as us-east or eu.")
    block_network: bool = Field(default=False, title="Block network", description="Code has no network at all.")
    allowed_domains: list[str] | None = Field(
        default=None,
        title="Allowed domains",
        description="The only names that code may connect to; *.example.org covers all below it.",
    )
    allowed_cidrs: list[str] | None = Field(
        default=None, title="Allowed addresses", description="The only address ranges that code may connect to."
    )
    workdir: str = Field(
        default="/sandbox",
        title="Directory",
        pattern="^/.",
        description="Where the code runs, and where the repository is cloned to.",
    )
    lifetime: int = Field(
        default=14_400,
        ge=10,
        le=86_400,
        title="Lifetime",
        description="Seconds after which Modal itself ends a sandbox, whatever became of its host: longer than any of "
        "its executions, and 24 hours at most.",
    )
    idle_timeout: int = Field(
        default=60,
        ge=1,
        title="Idle timeout",
        description="Seconds after which Modal ends a sandbox whose driver has ended, as it does 90 s after its host "
        "fell silent.",
    )
    start_timeout: int = Field(
        default=600,
        ge=1,
        title="Start timeout",
        description="Seconds in which Modal has to open a sandbox: it may be looking for a machine.",
    )


class ModalFields(SandboxFields, total=False):
    """The keywords of `ModalSandbox` and `ModalInterpreter`, for type checkers."""

    packages: list[str] | tuple[str, ...]
    token_id: SecretStr | str | None
    token_secret: SecretStr | str | None
    app_name: str
    image: str | None
    cpu: float | None
    memory_mib: int | None
    gpu: str | None
    region: str | None
    block_network: bool
    allowed_domains: list[str] | tuple[str, ...] | None
    allowed_cidrs: list[str] | tuple[str, ...] | None
    workdir: str
    idle_timeout: int
