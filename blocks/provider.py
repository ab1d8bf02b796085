"""The base class of the sandbox providers: open, list and delete sandboxes. This module does not need Prefect."""

import asyncio
import hashlib
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr, ValidationError

from ..sandbox.driver_settings import Preparation
from ..sandbox.errors import ConfigurationError
from ..sandbox.interpreter import Interpreter
from ..sandbox.outcomes.text_escape import SecretFilter
from ..sandbox.process_identity import read_own_identity
from ..sandbox.result import Result
from ..sandbox.sandbox_api import Sandbox
from ..sandbox.sync_interpreter import SyncInterpreter
from . import git as repository
from .host_files.files import HostFiles, read_host_files
from .host_files.mounts import overlaps
from .language_model.credentials import build_secret_filter
from .problems import describe_problems
from .registry import PROVIDERS
from .sandbox_volume import SandboxVolume
from .settings import SandboxSettings, SetupSettings
from .volume import VolumeStore

MANAGED_LABELS = {"managed-by": "rlm-batch"}


@dataclass
class SandboxInfo:
    """A sandbox with rlm-batch's labels, as its provider lists it. Times are in epoch seconds, and 0 if unknown.

    Attributes:
        abandoned: True if its host process is dead; only the local provider knows.
        run: Id of the sandbox's flow run, empty if a script opened the sandbox.
        server: Id of the flow run's Prefect server, empty if a script opened the sandbox.
        host: Name of the machine that opened the sandbox.
        process: Identity of the process that opened the sandbox, empty if unknown. See `process_identity`.
        began: Time when the sandbox was requested.
        expires: Time when the sandbox's lifetime ends.
        kept_until: Time until which the sandbox of a failed execution is kept.
        execution: Number of the failed execution for which the sandbox is kept; None if unknown.
    """

    id: str
    labels: dict[str, str]
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.run = self.labels.get("rlm-batch-run", "")
        self.server = self.labels.get("rlm-batch-server", "")
        self.host = self.labels.get("rlm-batch-host", "")
        self.process = self.labels.get("rlm-batch-process", "")
        self.began = self._read_number("began") or 0
        self.expires = self._read_number("expires") or 0
        self.kept_until = self._read_number("kept") or 0
        self.execution = self._read_number("execution")

    def _read_number(self, name: str) -> int | None:
        text = self.labels.get(f"rlm-batch-{name}", "")
        return int(text) if text.isdecimal() else None


def build_kept_labels(until: float, execution: int | None) -> dict[str, str]:
    """Return the labels of a kept sandbox, which `SandboxInfo` reads."""
    labels = {"rlm-batch-kept": f"{until:.0f}"}
    return labels if execution is None else {**labels, "rlm-batch-execution": str(execution)}


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot of a sandbox after its set-up. `size` is in GiB, and times are in epoch seconds."""

    id: str
    name: str
    size: float
    created: float
    last_used: float
    expires: float


class SandboxProvider(SandboxSettings, ABC):
    """A provider: opens sandboxes, lists those with rlm-batch's labels, and deletes one by its id."""

    provider_name: ClassVar[str]
    gradual: ClassVar[bool] = True  # Flow runs start with few sandboxes, so that other users get some too.
    uploads_files: ClassVar[bool] = True  # Files of the host are uploaded to its sandboxes.
    keeps_snapshots: ClassVar[bool] = False  # It makes snapshots of set-ups, which can be listed and deleted.
    binds_mounts: ClassVar[bool] = False  # Mounts are bound from the host, even if other files are uploaded.
    has_this_python: ClassVar[bool] = False  # Code runs in the Python of this process.
    result_settings: ClassVar[tuple[str, ...]] = ()  # Fields of the provider that a result depends on.
    _commit: str | None = PrivateAttr(default=None)
    _files: HostFiles = PrivateAttr(default=HostFiles())
    _expected_sandboxes: int = PrivateAttr(default=1)
    _keeps_failed: bool = PrivateAttr(default=False)
    # Values of `environment` that a run's parameters show.
    _shown_values: frozenset[str] = PrivateAttr(default=frozenset())

    @abstractmethod
    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Open a sandbox with these labels. A failed attempt leaves nothing behind.

        Raises:
            SandboxStartError: The sandbox did not start.
            QuotaExceeded: The account's quota is used up.
            ConfigurationError: The settings or the credentials are wrong.
        """

    @abstractmethod
    async def list_sandboxes(self) -> list[SandboxInfo]:
        """Return all sandboxes with rlm-batch's labels, also those that another process or user opened."""

    @abstractmethod
    async def delete_sandbox(self, sandbox_id: str) -> bool:
        """Delete a sandbox with all its processes. Return False if it is missing, which is not an error."""

    @abstractmethod
    async def open_terminal(self, sandbox_id: str) -> int:
        """Open a shell in a kept sandbox, in the terminal of this process, and return the shell's exit status."""

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """Return the snapshots of set-ups that rlm-batch made. This default is for providers without snapshots."""
        return []

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot of a set-up. Deleting a missing one is not an error."""
        raise NotImplementedError

    @abstractmethod
    async def list_volumes(self) -> list[str]:
        """Return the names of all volumes of the account, sorted, also those that rlm-batch did not create."""

    @abstractmethod
    async def check(self) -> str:
        """Describe the isolation in a line for `rlm-batch doctor`. Raises ConfigurationError if no sandbox can open."""

    async def describe_sandboxes(self) -> str:
        """Return a phrase for the first line of a run, such as "in local sandboxes (bubblewrap)"."""
        return f"in {self.provider_name.capitalize()} sandboxes"

    def list_versions(self) -> list[str]:
        """Return the sandboxes' Python and packages with versions, or the packages as named if versions are unknown."""
        return sorted(self.packages)

    async def volume(self, name: str | None = None) -> VolumeStore:
        """Return a volume for use from the host, by default that of the block's `volume_name`."""
        name = name or self.volume_name
        if name is None:
            raise ConfigurationError("no volume is named: pass a name, or use a block with volume_name")
        return await self.open_volume(name)

    async def open_volume(self, name: str) -> VolumeStore:
        """Return the volume of that name. This default uses a sandbox, for APIs without access to files."""
        # A sandbox that only reads a volume starts faster without a repository and packages.
        plain: dict[str, Any] = {"volume_name": name, "repo_url": None, "packages": []}
        setup = {"setup": None} if isinstance(self, SetupSettings) else {}
        provider = self.model_copy(update=plain | setup)
        provider._files = HostFiles()
        return SandboxVolume(provider.interpreter)

    async def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a result depends on, as JSON without secrets and limits."""
        settings: dict[str, Any] = {"provider": self.provider_name}
        if self.repo_url is not None:
            settings["repository"] = [self.repo_url, await self.commit()]
        if self.packages:
            settings["packages"] = sorted(self.packages)
        if isinstance(self, SetupSettings) and self.setup is not None:
            settings["setup"] = self.setup
        if self.volume_name is not None:
            settings["volume"] = [self.volume_name, self.volume_mount_path]
        if self.environment:
            # Values that may be secrets, of a block or of a run's `secrets`, count only by their names.
            values = self.reveal_environment()
            settings["environment"] = {
                name: value if value in self._shown_values else None for name, value in values.items()
            }
        for name in self.result_settings:
            value = getattr(self, name)
            if value is not None and value is not False:
                settings[name] = value
        return {**settings, **await asyncio.to_thread(self._files.build_fingerprint)}

    async def commit(self) -> str | None:
        """Return the commit that every sandbox of this block checks out, or None without a repository."""
        if self.repo_url is not None and self._commit is None:
            self._commit = await repository.resolve_commit(self.repo_url, self.repo_ref, self.repo_token)
        return self._commit

    def pin(self, commit: str) -> None:
        """Use this commit of the repository in every sandbox of this block, even if `repo_ref` has moved."""
        self._commit = commit

    def with_options(self, options: dict[str, Any] | None) -> Self:
        """Return a copy with per-run overrides.

        Args:
            options: Values by the names of the block's fields. Secrets are refused, because a flow run shows its
                parameters. Variables in `environment`, which must be no secrets, are added to the block's. A block with
                a `repo_token` also refuses `repo_url`, because the token would go elsewhere.

        Raises:
            ConfigurationError: An option is unknown, not allowed for one run, or invalid.
        """
        if not options:
            return self
        settings = PROVIDERS[self.provider_name].load_settings()
        known = settings.list_run_settings()
        for name in options:
            if name not in settings.model_fields:
                raise ConfigurationError(
                    f"the provider {self.provider_name} has no setting `{name}`: it has {', '.join(known)}"
                )
            sends_token_elsewhere = name == "repo_url" and self.repo_token is not None
            if name not in (*known, "environment") or sends_token_elsewhere:
                raise ConfigurationError(
                    f"{name} cannot be set for one run, because it is a secret, decides where one is sent, applies to "
                    "all runs of a block, or is part of the provider's name (local:landlock): save a block with it, "
                    f"and pass `provider` {PROVIDERS[self.provider_name].slug}/NAME"
                )
        try:
            checked = settings.model_validate({name: getattr(self, name) for name in settings.model_fields} | options)
        except ValidationError as error:
            raise ConfigurationError(describe_problems(error, settings.list_secrets())) from None
        changed = {name: getattr(checked, name) for name in options}
        if "environment" in changed:
            changed["environment"] = {**self.environment, **changed["environment"]}
        provider = self.model_copy(update=changed)
        if "environment" in options:
            provider._shown_values |= set(checked.reveal_environment().values())
        return provider

    def with_expectations(self, *, sandboxes: int, keeps_failed: bool) -> Self:
        """Return a copy that will open about this many sandboxes, and may keep those of failed executions."""
        provider = self.model_copy()
        provider._expected_sandboxes = sandboxes
        provider._keeps_failed = keeps_failed
        return provider

    def with_files(self, python_path: Sequence[str] | None = None, mounts: Mapping[str, Any] | None = None) -> Self:
        """Return a copy whose sandboxes have these files of the host, which this call reads.

        Raises ConfigurationError, also for a mount that overlaps the volume.
        """
        provider = self.model_copy()
        provider._files = read_host_files(
            python_path, mounts, is_uploaded=self.uploads_files, is_bound=self.binds_mounts
        )
        provider.check_mounts()
        return provider

    def check_mounts(self) -> None:
        """Raise ConfigurationError if a mount overlaps the volume's mount path."""
        for mount in self._files.mounts:
            if self.volume_name is not None and overlaps(mount.target, self.volume_mount_path):
                raise ConfigurationError(
                    f"mounts: {mount.target} overlaps the volume {self.volume_name} at "
                    f"{self.volume_mount_path}: use another path"
                )

    async def compute_files_digest(self) -> str | None:
        """Return a hash of the host's files in this provider's sandboxes, or None without files."""
        fingerprint = await asyncio.to_thread(self._files.build_fingerprint)
        if not fingerprint:
            return None
        return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()

    def with_files_of(self, other: "SandboxProvider") -> Self:
        """Return a copy with the host's files of another provider of the same class."""
        provider = self.model_copy()
        provider._files = other._files
        provider.check_mounts()
        return provider

    def has_credentials(self) -> bool:
        """Return whether the settings or the environment have the credentials to sign in."""
        return True

    def labels(self, run: str, server: str = "") -> dict[str, str]:
        """Return the labels for a sandbox that this process opens now. In a script, `run` and `server` are empty."""
        now = int(time.time())
        labels = {
            **MANAGED_LABELS,
            "rlm-batch-run": run,
            "rlm-batch-host": socket.gethostname(),
            "rlm-batch-began": str(now),
            "rlm-batch-expires": str(now + self.lifetime),
        }
        optional = {"rlm-batch-server": server, "rlm-batch-process": read_own_identity()}
        return labels | {name: value for name, value in optional.items() if value}

    async def open_labelled(self, run: str = "", server: str = "") -> Sandbox:
        """Open a sandbox with this process's labels. Its output does not show secrets of `environment`."""
        sandbox = await self.open(self.labels(run, server))
        sandbox.hide = self.build_secret_filter()
        sandbox.mounts = tuple(mount.target for mount in self._files.mounts)
        return sandbox

    def build_secret_filter(self) -> SecretFilter | None:
        """Return a filter that blanks the secrets of `environment` in a text; None if none is long enough."""
        return build_secret_filter(frozenset(self.reveal_environment().values()) - self._shown_values)

    def interpreter(
        self,
        *,
        run: str = "",
        server: str = "",
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        prepare: Preparation | None = None,
    ) -> Interpreter:
        """Return an interpreter that opens a new sandbox when it starts.

        Args:
            run: The flow run's id, for the sandbox's label.
            server: The Prefect server's id, for the sandbox's label.
            timeout: Seconds for each execution; see `Interpreter`.
            tools: Functions of the host that code may call by name.
            prepare: Code that runs once when the sandbox is open.
        """
        return Interpreter(lambda: self.open_labelled(run, server), timeout=timeout, tools=tools, prepare=prepare)

    def run(
        self,
        code: str | Callable[..., object],
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> Result:
        """Run one piece of code in a new sandbox, delete the sandbox, and return what the code submitted.

        This call blocks. In async code use `async with block.interpreter()`.

        Args:
            code: The code, or a function.
            variables: Values that the code finds as global variables.
            timeout: Seconds for the execution; None for no limit.
            tools: Functions of the host that code may call by name.
        """
        with SyncInterpreter(self.open_labelled, timeout=timeout, tools=tools) as interpreter:
            return interpreter.execute(code, variables)

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the schema for a block's form: first the account's settings, then the provider's, then the common."""
        schema = super().model_json_schema(*arguments, **options)
        common = [name for name in SandboxSettings.model_fields if name not in cls.account_settings]
        fields = schema["properties"]
        own = [name for name in fields if name not in common]
        order = [*cls.account_settings, *own, *common]  # A dict keeps a repeated name at its first place.
        schema["properties"] = {name: fields[name] for name in order if name in fields}
        return schema
