"""What every provider of sandboxes is: a Prefect block that can open them, list them and remove them."""

from __future__ import annotations

import math
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator

from ..sandbox.errors import ConfigurationError
from ..sandbox.interpreter import Interpreter
from . import git as repository

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..sandbox.provider_api import Sandbox
    from .volume import VolumeStore


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox that carries our labels, as its provider lists it."""

    id: str
    labels: dict[str, str]
    abandoned: bool = False  # its host is known to have died, which only the local provider can tell

    @property
    def expires(self) -> float:
        """When its lifetime is over, in epoch seconds; 0 where the label is missing or damaged."""
        return self._time("expires")

    @property
    def began(self) -> float:
        """When it was asked for, in epoch seconds; 0 where the label is missing or damaged."""
        return self._time("began")

    @property
    def run(self) -> str:
        """The id of its flow run; empty for a script's."""
        return self.labels.get("rlm-batch-run", "")

    @property
    def server(self) -> str:
        """The id of the Prefect server that has its flow run; empty for a script's."""
        return self.labels.get("rlm-batch-server", "")

    def _time(self, name: str) -> float:
        try:
            found = float(self.labels[f"rlm-batch-{name}"])
        except (KeyError, ValueError):
            return 0.0
        return found if math.isfinite(found) else 0.0


class SandboxProvider(Block, ABC):
    """Opens sandboxes, lists those that carry our labels, and removes one by its id."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)  # there are secrets in it
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]
    provider_name: ClassVar[str]
    gradual: ClassVar[bool] = True  # whether a flow run opens many sandboxes one after the other: others are served too
    _commit: str | None = PrivateAttr(default=None)

    volume_name: str | None = Field(
        default=None,
        title="Volume",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="A durable directory that every sandbox of this block has, made when it is first asked for.",
    )
    volume_mount_path: str = Field(
        default="/data", title="Mount path", pattern="^/.", description="Where the code finds the volume."
    )
    repo_url: str | None = Field(
        default=None,
        title="Repository",
        description="A Git repository that is cloned for each sandbox; the code runs in the clone's directory.",
    )
    repo_ref: str | None = Field(
        default=None,
        title="Revision",
        description="A branch, a tag or a commit; by default what the repository's HEAD names. It is resolved once for "
        "a flow run, so that all of its executions see the same commit.",
    )
    repo_token: SecretStr | None = Field(
        default=None,
        title="Repository token",
        description="For a private repository over HTTPS. The code cannot read it.",
    )
    packages: list[str] = Field(
        default_factory=list,
        title="Packages",
        description="Requirements (numpy, pandas>=2) that are installed before the first execution.",
    )
    environment: dict[str, SecretStr] = Field(
        default_factory=dict,
        title="Environment",
        description="Environment variables that the sandboxed code sees. No other secret reaches it.",
    )
    max_sandboxes: int | None = Field(
        default=None,
        ge=1,
        title="Most sandboxes",
        description="How many sandboxes flows may have at one time, over every flow run and machine that shares the "
        "Prefect server. By default there is no limit but each run's max_workers.",
    )
    creations_per_second: float | None = Field(
        default=None,
        gt=0,
        title="Creations a second",
        description="How many new sandboxes a second flows may ask for, over the same. By default there is no limit.",
    )
    limit_name: str | None = Field(
        default=None,
        title="Limit name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Blocks that share an account share its limits by giving them one name, and the same numbers. By "
        "default a block has limits of its own.",
    )
    lifetime: int = Field(
        default=86_400,
        ge=1,
        title="Lifetime",
        description="Seconds after which the provider itself removes a sandbox, whatever became of its host.",
    )

    @field_validator("packages")
    @classmethod
    def _requirements(cls, packages: list[str]) -> list[str]:
        for package in packages:
            if not package.strip() or package.lstrip().startswith("-"):
                raise ValueError(
                    f"{package!r} is no requirement: give names such as numpy or pandas>=2, and no options"
                )
        return packages

    @field_validator("environment")
    @classmethod
    def _variables(cls, environment: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{name!r} is no name of an environment variable: it is a text without = in it")
            if "\0" in value.get_secret_value():
                raise ValueError(
                    f"the value of {name} has a null character, which no environment can hold: leave it out"
                )
        return environment

    @abstractmethod
    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Opens a sandbox. Raises SandboxStartError, QuotaExceeded or ConfigurationError, and leaves nothing then."""

    @abstractmethod
    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes that carry our labels, whoever opened them."""

    @abstractmethod
    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Removes one, with all that runs in it. One that has gone is no error."""

    @abstractmethod
    async def check(self) -> str:
        """What keeps code in, in a line for a log. Raises ConfigurationError where no sandbox can be opened."""

    async def volume(self, name: str | None = None) -> VolumeStore:
        """The volume of that name, by default this block's own, from the host's side.

        Raises ConfigurationError where there is no name.
        """
        name = name or self.volume_name
        if name is None:
            raise ConfigurationError("no volume is named: pass a name, or use a block that has volume_name")
        return await self.open_volume(name)

    async def open_volume(self, name: str) -> VolumeStore:
        """The provider's part of `volume`: from a sandbox, where its API has no other way."""
        from .sandbox_volume import SandboxVolume

        return SandboxVolume(self, name)

    async def fingerprint(self) -> dict[str, Any]:
        """The settings that a result depends on, no secrets and no limits: JSON.

        A provider adds its own (an image, resources). Raises ConfigurationError where the repository has no such ref.
        """
        found: dict[str, Any] = {"provider": self.provider_name}
        if self.repo_url is not None:
            found["repository"] = [self.repo_url, await self.commit()]
        if self.packages:
            found["packages"] = sorted(self.packages)
        if self.volume_name is not None:
            found["volume"] = [self.volume_name, self.volume_mount_path]
        return found

    async def commit(self) -> str | None:
        """The commit that every sandbox of this block has, None without a repository; found out once.

        Raises ConfigurationError.
        """
        if self.repo_url is not None and self._commit is None:
            self._commit = await repository.commit(self.repo_url, self.repo_ref, self.repo_token)
        return self._commit

    def pin(self, commit: str) -> None:
        """Every sandbox of this block has that commit of its repository, wherever its ref has gone since."""
        self._commit = commit

    @property
    def counted(self) -> bool:
        """Whether there is a limit on sandboxes, so that removing one has to last until it has gone."""
        return self.max_sandboxes is not None

    def has_credentials(self) -> bool:
        """Whether it can sign in with what it was given and what the environment has."""
        return True

    def labels(self, run: str, server: str = "") -> dict[str, str]:
        """What a sandbox is labelled with: `run` is the flow run's id and `server` its Prefect server's.

        A script's has no flow run, and no server.
        """
        now = int(time.time())
        return {
            "managed-by": "rlm-batch",
            "rlm-batch-run": run,
            **({"rlm-batch-server": server} if server else {}),
            "rlm-batch-host": socket.gethostname(),
            "rlm-batch-began": str(now),
            "rlm-batch-expires": str(now + self.lifetime),
        }

    def interpreter(
        self,
        *,
        run: str = "",
        server: str = "",
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> Interpreter:
        """An interpreter in a sandbox of its own, not yet open.

        `run` and `server` are for its labels, the other parameters are those of `Interpreter`.
        """
        return Interpreter(lambda: self.open(self.labels(run, server)), timeout=timeout, tools=tools)
