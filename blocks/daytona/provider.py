"""Daytona as a provider of sandboxes, through its SDK's asynchronous client.

The SDK is imported when the first sandbox is opened, because that takes seconds and a hundred megabytes once per
process. So the modules that use it are imported in the methods.
"""

import asyncio
import logging
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError
from ...sandbox.sandbox_api import Sandbox
from ..host_terminal import run_in_terminal
from ..provider import MANAGED_LABELS, SandboxInfo, SandboxProvider, SnapshotInfo
from .settings import DEFAULT_API_URL, DaytonaSettings

if TYPE_CHECKING:
    import daytona

DELETED_VOLUME_STATES = ("pending_delete", "deleting", "deleted")
SHELL_MINUTES = 60  # A kept sandbox lives for an hour.

log = logging.getLogger("rlm_batch.daytona")


class DaytonaProvider(DaytonaSettings, SandboxProvider):
    """The provider for sandboxes of a Daytona account."""

    provider_name: ClassVar[str] = "daytona"
    keeps_snapshots: ClassVar[bool] = True
    result_settings: ClassVar[tuple[str, ...]] = (
        "snapshot", "image", "cpu", "memory", "disk", "network_block_all", "network_allow_list", "domain_allow_list",
    )  # fmt: skip

    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Open a sandbox, clone the repository into it and install the packages; see `SandboxProvider.open`."""
        commit = await self.commit()
        async with self._use_client("the sandbox could not be set up") as client:
            from .creation import open_sandbox

            return await open_sandbox(client, self, labels, commit, self._files, self._expected_sandboxes)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """List the account's sandboxes that carry this package's labels, except those in deletion."""
        return await self._list_sandboxes("the sandboxes could not be listed", MANAGED_LABELS)

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        async with self._use_client(f"sandbox {sandbox_id} could not be removed") as client:
            from .account import DELETE_SECONDS, delete_sandbox, find_sandbox, is_in_deletion

            remote = await find_sandbox(client, sandbox_id, seconds=DELETE_SECONDS)
            if remote is None or is_in_deletion(remote):
                return False
            await delete_sandbox(remote)
            return True

    async def open_terminal(self, sandbox_id: str) -> int:
        """Run `ssh` to a sandbox with an access that Daytona grants for it. Raise RlmBatchError."""
        async with self._use_client(f"no shell could be opened in sandbox {sandbox_id}") as client:
            remote = await client.get(sandbox_id)
            access = await remote.create_ssh_access(SHELL_MINUTES)
            try:
                shown = access.ssh_command.replace(access.token, "TOKEN")
                return await run_in_terminal(shlex.split(access.ssh_command), shown)
            finally:
                with suppress(Exception):
                    await run_shielded(remote.revoke_ssh_access(access.token))

    async def list_snapshots(self) -> list[SnapshotInfo]:
        async with self._use_client("the snapshots could not be listed") as client:
            from .snapshots import list_snapshots

            return await list_snapshots(client, self.snapshot_ttl)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        async with self._use_client(f"snapshot {snapshot_id} could not be deleted") as client:
            from .snapshots import delete_snapshot

            await delete_snapshot(client, snapshot_id)

    async def list_volumes(self) -> list[str]:
        async with self._use_client("the volumes could not be listed") as client:
            from .errors import get_state, retry_call

            volumes = await retry_call(client.volume.list)
            return sorted(volume.name for volume in volumes if get_state(volume) not in DELETED_VOLUME_STATES)

    async def check(self) -> str:
        """Describe where sandboxes come from, after checking the API key. Raise ConfigurationError."""
        try:
            # No sandbox has this label, so the list is short.
            await self._list_sandboxes("Daytona could not be asked", {**MANAGED_LABELS, "rlm-batch-run": "none"})
        except ConfigurationError:
            raise
        except RlmBatchError as error:
            log.warning("%s", error)  # Daytona may answer when the first sandbox is opened.
        origin = f"image {self.image}" if self.image else f"snapshot {self.snapshot or 'of the account'}"
        api_url = self.get_account_setting("api_url") or os.environ.get("DAYTONA_API_URL") or DEFAULT_API_URL
        return f"daytona ({urlsplit(api_url).netloc}, {origin})"

    def has_credentials(self) -> bool:
        """Return True if the block or the environment has a key."""
        has_variable = bool(os.environ.get("DAYTONA_API_KEY") or os.environ.get("DAYTONA_JWT_TOKEN"))
        return has_variable or self.get_account_setting("api_key") is not None

    async def _list_sandboxes(self, failure: str, labels: dict[str, str]) -> list[SandboxInfo]:
        async with self._use_client(failure) as client:
            import daytona

            from .account import is_in_deletion
            from .errors import CALL_SECONDS, retry_call

            # The query's `states` would need every state, including those that Daytona adds later.
            query = daytona.ListSandboxesQuery(labels=labels)

            async def list_all() -> list[SandboxInfo]:
                sandboxes = [item async for item in client.list(query, CALL_SECONDS)]
                return [SandboxInfo(item.id, dict(item.labels)) for item in sandboxes if not is_in_deletion(item)]

            return await retry_call(list_all)

    @asynccontextmanager
    async def _use_client(self, failure: str) -> "AsyncIterator[daytona.AsyncDaytona]":
        """Yield this loop's client, and convert DaytonaErrors. `failure` says what could not be done."""
        # A thread imports the SDK and the modules that use it, because that takes seconds.
        await asyncio.to_thread(import_module, ".creation", __package__)
        from .client import get_client
        from .errors import convert_errors

        with convert_errors(failure):
            yield get_client(self)
