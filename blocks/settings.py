"""The settings that all sandbox providers share. They need only pydantic, so scripts can use them without Prefect."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo

ENVIRONMENT = "environment"  # A value of `packages`: the packages of the running environment.
# The variables that Python reads when it starts, for sandboxes on this machine. The code's processes get them too.
START_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
USER_NAME = "sandbox"  # name of the user that runs code in sandboxes on this machine
MAX_MIB = 1 << 40  # The kernel stores a limit as a signed 64-bit number of bytes.
VolumeRoot = Annotated[
    str | None,
    Field(
        title="Volumes",
        description="Directory of volumes, also of the other providers on this machine. By default it is "
        "RLM_BATCH_VOLUMES, or one below the user's data directory.",
    ),
]
MountPath = Annotated[str, Field(title="Mount path", pattern="^/.", description="Path of the volume in the sandbox.")]


def _check_wheel_requirements(requirements: list[str]) -> None:
    """Raise ValueError unless each requirement names a package on the index, with versions, extras or a marker."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requirements:
        try:
            is_name = Requirement(text).url is None
        except InvalidRequirement:
            is_name = False
        if not is_name:
            name = re.split("[@:]", text)[0].strip()  # The rest may contain a password.
            raise ValueError(
                f"{name!r} is not the name of a package: local sandboxes install only wheels from the "
                "index, such as numpy or pandas>=2; for your own modules use "
                f"`python_path` or `repo_url`"
            )


class SandboxSettings(BaseModel):
    """The common settings of a provider: the volume, the repository, the packages, the environment and the limits."""

    # The input has secrets. The command line reads the fields of all providers, and validates those of one.
    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True, defer_build=True)

    # These settings cannot change for one run. Otherwise the person who starts a run could send a block's secrets
    # elsewhere, or lift the limits that apply to all runs.
    account_settings: ClassVar[tuple[str, ...]] = ()  # The credentials, first in a block's form.
    block_only: ClassVar[tuple[str, ...]] = ("max_sandboxes", "creations_per_second", "limit_name")

    takes_environment: ClassVar[bool] = False  # Its sandboxes can use this machine's packages.
    takes_wheels_only: ClassVar[bool] = False  # Building another package would run its code on this machine.

    volume_name: str | None = Field(
        default=None,
        title="Volume",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Volume to mount, created on first use. It is a durable directory that every sandbox has.",
    )
    volume_mount_path: MountPath = "/data"
    repo_url: str | None = Field(
        default=None,
        title="Repository",
        description="Git repository to clone for each sandbox. The code runs in the clone's directory.",
    )
    repo_ref: str | None = Field(
        default=None,
        title="Revision",
        description="Branch, tag or commit; by default HEAD. It is resolved once for a flow run, so all executions "
        "see the same commit.",
    )
    repo_token: SecretStr | None = Field(
        default=None,
        title="Repository token",
        description="Token for a private repository over HTTPS. The code cannot read it.",
    )
    packages: list[str] = Field(
        default_factory=list,
        title="Packages",
        description="Packages to install, such as pandas>=2. They are installed before the first execution. For local "
        "sandboxes, environment means all packages of the running environment.",
    )
    environment: dict[str, SecretStr] = Field(
        default_factory=dict,
        title="Environment",
        description="Environment variables of the code, which sees no other secrets. In what it prints or raises, "
        "[...] replaces their values of six characters or more.",
    )
    max_sandboxes: int | None = Field(
        default=None,
        ge=1,
        title="Most sandboxes",
        description="Sandboxes that flows may have at the same time; no limit by default. All flow runs and machines "
        "that share the Prefect server share the limit. Each run is also limited by its max_workers.",
    )
    creations_per_second: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Creations a second",
        description="New sandboxes per second that flows may request; no limit by default. All flow runs and machines "
        "that share the Prefect server share the limit.",
    )
    limit_name: str | None = Field(
        default=None,
        title="Limit name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of limits that several blocks of one account share; they need the same numbers. By default a "
        "block's limits are separate.",
    )
    lifetime: int = Field(
        default=86_400,
        ge=1,
        title="Lifetime",
        description="Seconds before the provider deletes the sandbox, even if the host is gone.",
    )

    start_timeout: int = Field(
        default=120,
        ge=1,
        title="Start timeout",
        description="Seconds that a sandbox may take to start. This includes time in the provider's queue. A run whose "
        "sandboxes are refused for this long starts no more executions.",
    )

    @field_validator("packages", mode="before")
    @classmethod
    def _read_environment(cls, packages: Any) -> Any:
        return [packages] if packages == ENVIRONMENT else packages

    @field_validator("packages")
    @classmethod
    def _check_packages(cls, packages: list[str]) -> list[str]:
        if ENVIRONMENT in packages and not cls.takes_environment:
            raise ValueError(
                f"{ENVIRONMENT!r} works only in local sandboxes, because it means this machine's "
                "packages: name the requirements, such as numpy or pandas>=2"
            )
        if ENVIRONMENT in packages and len(packages) > 1:
            raise ValueError(f"{ENVIRONMENT!r} means all packages of the running environment, and allows no others")
        for package in packages:
            if not package.strip() or package.lstrip().startswith("-"):
                raise ValueError(
                    f"{package!r} is not a requirement: give names such as numpy or pandas>=2, and no options"
                )
        if cls.takes_wheels_only:
            _check_wheel_requirements(packages)
        return packages

    @field_validator("repo_url")
    @classmethod
    def _check_repository(cls, url: str | None) -> str | None:
        if url is not None and re.match("[^/@]+://[^/@]*:[^/@]*@", url):
            raise ValueError(
                "repo_url contains a password, which logs would show: remove user and password from it, and set "
                "repo_token"
            )
        return url

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, environment: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in environment.items():
            has_null = "\0" in name + value.get_secret_value()
            if not name or "=" in name or has_null:
                raise ValueError(
                    f"{name!r} is not the name of an environment variable, or its value has a null character"
                )
        return environment

    @classmethod
    def list_run_settings(cls) -> dict[str, FieldInfo]:
        """Return the settings that one run may override, by name."""
        return {
            name: field
            for name, field in cls.model_fields.items()
            if name not in cls.block_only and "SecretStr" not in str(field.annotation)
        }

    @classmethod
    def list_secrets(cls) -> list[str]:
        """Return the names of the settings that have secrets."""
        return [name for name, field in cls.model_fields.items() if "SecretStr" in str(field.annotation)]

    def reveal_environment(self) -> dict[str, str]:
        """Return the environment variables of the code with their secret values."""
        return {name: value.get_secret_value() for name, value in self.environment.items()}

    def build_host_environment(self, home: str, tmp: str) -> dict[str, str]:
        """Return the environment variables of code in a sandbox on this machine."""
        own = {"HOME": home, "USER": USER_NAME, "LOGNAME": USER_NAME, "TMPDIR": tmp}
        return {**START_ENVIRONMENT, **own, **self.reveal_environment()}

    def get_account_setting(self, name: str) -> Any:
        """Return a setting of the account. Blocks also read it from their credentials."""
        return getattr(self, name)

    def reveal_account_setting(self, name: str) -> str | None:
        """Return a setting of the account as text, even if it is a secret."""
        value = self.get_account_setting(name)
        return value.get_secret_value() if isinstance(value, SecretStr) else value

    @property
    def has_sandbox_limit(self) -> bool:
        """Return whether the number of sandboxes is limited. Then `delete_sandbox` must wait for the sandbox's end."""
        return self.max_sandboxes is not None


class SetupSettings(SandboxSettings):
    """The settings of sandboxes that can be set up by commands, and then copied."""

    setup: str | None = Field(
        default=None,
        title="Set-up",
        min_length=1,
        description="Shell commands that set a sandbox up, such as apt-get install -y graphviz. They run before "
        "everything else, with the network, and as root if the image allows that. They must contain no secrets.",
    )


class SnapshotSettings(SetupSettings):
    """The settings of sandboxes whose set-up is kept at the provider, for later sandboxes and runs."""

    setup_snapshot: Literal["auto", "always", "never"] = Field(
        default="auto",
        title="Keep the set-up",
        description="Whether the provider keeps a sandbox's set-up (`setup`, packages and repository), so that later "
        "sandboxes start from it: always, never, or auto for runs of more than 3 sandboxes.",
    )

    def keeps_set_up(self, expected: int) -> bool:
        """Return whether to keep the set-up for about this many `expected` sandboxes."""
        return self.setup_snapshot == "always" or (self.setup_snapshot == "auto" and expected > 3)
