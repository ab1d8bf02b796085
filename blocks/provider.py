"""What every provider of sandboxes does: it opens them, lists them and removes them. Nothing here needs Prefect."""

import asyncio
import difflib
import hashlib
import json
import math
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
from ..sandbox.process_identity import read_own_identity
from ..sandbox.result import Result
from ..sandbox.sandbox_api import Sandbox
from ..sandbox.sync_interpreter import SyncInterpreter
from . import git as repository
from .host_files.files import HostFiles, read_host_files
from .host_files.mounts import overlaps
from .sandbox_volume import SandboxVolume
from .settings import SandboxSettings, describe_problems
from .volume import VolumeStore

MANAGED_LABELS = {"managed-by": "rlm-batch"}


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox that carries our labels, as its provider lists it."""

    id: str
    labels: dict[str, str]
    abandoned: bool = False  # its host is known to have died, which only the local provider can tell

    @property
    def expires(self) -> float:
        """When its lifetime is over, in epoch seconds; 0 where the label is missing or damaged."""
        return self._read_epoch_seconds("expires")

    @property
    def began(self) -> float:
        """When it was asked for, in epoch seconds; 0 where the label is missing or damaged."""
        return self._read_epoch_seconds("began")

    @property
    def run(self) -> str:
        """The id of its flow run; empty for a script's."""
        return self.labels.get("rlm-batch-run", "")

    @property
    def server(self) -> str:
        """The id of the Prefect server that has its flow run; empty for a script's."""
        return self.labels.get("rlm-batch-server", "")

    @property
    def host(self) -> str:
        """The name of the machine that it was opened from."""
        return self.labels.get("rlm-batch-host", "")

    @property
    def process(self) -> str:
        """The identity of the process that opened it; empty where its system has none. See `process_identity`."""
        return self.labels.get("rlm-batch-process", "")

    def _read_epoch_seconds(self, name: str) -> float:
        try:
            seconds = float(self.labels[f"rlm-batch-{name}"])
        except (KeyError, ValueError):
            return 0.0
        return seconds if math.isfinite(seconds) else 0.0


class SandboxProvider(SandboxSettings, ABC):
    """Opens sandboxes, lists those that carry our labels, and removes one by its id."""

    provider_name: ClassVar[str]
    gradual: ClassVar[bool] = True  # whether a flow run opens many sandboxes one after the other: others are served too
    uploads_files: ClassVar[bool] = True  # whether its sandboxes are on other machines
    binds_mounts: ClassVar[bool] = False  # whether they see data of the host's where it is, all the same
    _commit: str | None = PrivateAttr(default=None)
    _files: HostFiles = PrivateAttr(default=HostFiles())

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
    async def list_volumes(self) -> list[str]:
        """The names of the volumes that there are, sorted: all of the account's, whoever made them."""

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
        """The volume of that name from the host's side: from a sandbox, where the provider's API has no other way."""
        # What belongs to the code and not to the volume is left out: it would only take time.
        plain = {"volume_name": name, "repo_url": None, "repo_ref": None, "repo_token": None, "packages": []}
        provider = self.model_copy(update=plain)
        provider._files = HostFiles()
        return SandboxVolume(provider.interpreter)

    async def fingerprint(self) -> dict[str, Any]:
        """The settings that a result depends on, no secrets and no limits: JSON.

        A provider adds its own (an image, resources). Raises ConfigurationError where the repository has no such ref.
        """
        settings: dict[str, Any] = {"provider": self.provider_name}
        if self.repo_url is not None:
            settings["repository"] = [self.repo_url, await self.commit()]
        if self.packages:
            settings["packages"] = sorted(self.packages)
        if self.volume_name is not None:
            settings["volume"] = [self.volume_name, self.volume_mount_path]
        return {**settings, **await asyncio.to_thread(self._files.build_fingerprint)}

    async def commit(self) -> str | None:
        """The commit that every sandbox of this block has, None without a repository; found out once.

        Raises ConfigurationError.
        """
        if self.repo_url is not None and self._commit is None:
            self._commit = await repository.resolve_commit(self.repo_url, self.repo_ref, self.repo_token)
        return self._commit

    def pin(self, commit: str) -> None:
        """Every sandbox of this block has that commit of its repository, wherever its ref has gone since."""
        self._commit = commit

    def with_options(self, options: dict[str, Any] | None) -> Self:
        """The same with other settings for one run, by the names of the block's fields. Raises ConfigurationError.

        Secrets are not among them, for who sees a flow run sees its parameters; nor is where a block's secret goes.
        """
        if not options:
            return self
        settings: type[SandboxSettings] = next(
            base for base in type(self).__mro__ if issubclass(base, SandboxSettings) and not issubclass(base, ABC)
        )
        known = settings.list_run_settings()
        for name in options:
            if name not in settings.model_fields:
                close = difflib.get_close_matches(str(name), known, 1)
                advice = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
                raise ConfigurationError(f"the provider {self.provider_name} has no option {name!r}: {advice}")
            if name not in known or (name == "repo_url" and self.repo_token is not None):
                raise ConfigurationError(
                    f"{name} is no option of a single run: it is a secret, or says where one goes, or holds for all "
                    "runs or is a level of isolation. Name a level with the provider (local:none), or save a block "
                    f"with the setting and name that (provider='{self.provider_name}-sandbox/NAME')"
                )
        try:
            checked = settings.model_validate({name: getattr(self, name) for name in settings.model_fields} | options)
        except ValidationError as error:
            wrong = describe_problems(error)
            raise ConfigurationError(f"the provider {self.provider_name} does not take its options: {wrong}") from None
        return self.model_copy(update={name: getattr(checked, name) for name in options})

    def with_files(self, python_path: Sequence[str] | None = None, mounts: Mapping[str, Any] | None = None) -> Self:
        """The same, whose sandboxes have the host's files that are named, as they are now.

        `python_path` are directories that code imports from, ahead of all others; `mounts` has files and directories by
        the absolute paths that code reads them at. They are read here. Raises ConfigurationError.
        """
        files = read_host_files(python_path, mounts, is_uploaded=self.uploads_files, is_bound=self.binds_mounts)
        return self.with_host_files(files)

    def check_mounts(self) -> None:
        """Raises ConfigurationError where its sandboxes could not have both their mounts and their volume."""
        for mount in self._files.mounts:
            if self.volume_name is not None and overlaps(mount.target, self.volume_mount_path):
                raise ConfigurationError(
                    f"mounts: {mount.target} is where the volume {self.volume_name} is ({self.volume_mount_path}): "
                    "name another place"
                )

    def with_host_files(self, files: HostFiles) -> Self:
        """The same, whose sandboxes have these files."""
        provider = self.model_copy()
        provider._files = files
        return provider

    async def compute_files_digest(self) -> str | None:
        """A hash of the host's files that its sandboxes have, None where they have none."""
        found = await asyncio.to_thread(self._files.build_fingerprint)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None

    def with_files_of(self, other: "SandboxProvider") -> Self:
        """The same with the host's files that another one of its kind has."""
        return self.with_host_files(other._files)

    def has_credentials(self) -> bool:
        """Whether it can sign in with what it was given and what the environment has."""
        return True

    def labels(self, run: str, server: str = "") -> dict[str, str]:
        """What a sandbox is labelled with: `run` is the flow run's id and `server` its Prefect server's.

        A script's has no flow run, and no server. The process is the one that asks for them, and opens the sandbox.
        """
        now, process = int(time.time()), read_own_identity()
        return {
            **MANAGED_LABELS,
            "rlm-batch-run": run,
            **({"rlm-batch-server": server} if server else {}),
            "rlm-batch-host": socket.gethostname(),
            **({"rlm-batch-process": process} if process else {}),
            "rlm-batch-began": str(now),
            "rlm-batch-expires": str(now + self.lifetime),
        }

    def check_preparation(self) -> None:
        """Raises ConfigurationError where these settings leave no room for executions that are forks."""
        return

    def interpreter(
        self,
        *,
        run: str = "",
        server: str = "",
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        prepare: Preparation | None = None,
    ) -> Interpreter:
        """An interpreter in a sandbox of its own, not yet open.

        `run` and `server` are for its labels, the other parameters are those of `Interpreter`. Raises
        ConfigurationError where nothing can be prepared there.
        """
        if prepare is not None:
            self.check_preparation()
        return Interpreter(lambda: self.open(self.labels(run, server)), timeout=timeout, tools=tools, prepare=prepare)

    def run(
        self,
        code: str | Callable[..., object],
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> Result:
        """Runs one piece of code in a sandbox of its own, which is gone then; returns what it submitted.

        `timeout` is in seconds. It waits: async code has `async with block.interpreter()` instead. Raises
        what `open` and `Interpreter.execute` raise.
        """
        with SyncInterpreter(lambda: self.open(self.labels("")), timeout=timeout, tools=tools) as interpreter:
            return interpreter.execute(code, variables)

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The schema of the settings, for a block's form: the account's first, then the provider's, then the common."""
        schema = super().model_json_schema(*arguments, **options)
        common = [name for name in SandboxSettings.model_fields if name not in cls.account_settings]
        fields = schema["properties"]
        order = (cls.account_settings, [name for name in fields if name not in common], common)
        schema["properties"] = {name: fields[name] for names in order for name in names if name in fields}
        return schema
