"""Daytona as a provider of sandboxes, through its SDK's asynchronous client.

The SDK is imported when the first sandbox is opened, because that takes seconds and a hundred megabytes once per
process.
"""

import asyncio
import logging
import os
import sys
from importlib import import_module
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxLost
from ...sandbox.sandbox_api import Sandbox
from ..provider import MANAGED_LABELS, SandboxInfo, SandboxProvider, SnapshotInfo
from .settings import DaytonaSettings

DELETED_VOLUME_STATES = ("pending_delete", "deleting", "deleted")
log = logging.getLogger("rlm_batch.daytona")
# accounts that accepted a call of this process, so later runs skip the check
_accepted_accounts: set[tuple[str | None, ...]] = set()


class DaytonaProvider(DaytonaSettings, SandboxProvider):
    """The provider for sandboxes of a Daytona account."""

    provider_name: ClassVar[str] = "daytona"
    keeps_snapshots: ClassVar[bool] = True

    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Open a sandbox, clone the repository into it and install the packages; see `SandboxProvider.open`."""
        await _import_sdk()
        from .creation import open_sandbox

        return await open_sandbox(self, labels, await self.commit(), self._files, self._expected_sandboxes)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """List the account's sandboxes that carry this package's labels, except those in deletion."""
        await _import_sdk()
        import daytona

        from .client import use_client
        from .deletion import is_in_deletion
        from .errors import CALL_SECONDS, retry_call

        async def list_all() -> list[SandboxInfo]:
            # The query's `states` would need every state, including those that Daytona adds later.
            query = daytona.ListSandboxesQuery(labels=MANAGED_LABELS)
            return [
                SandboxInfo(item.id, dict(item.labels))
                async for item in client.sdk.list(query, CALL_SECONDS)
                if not is_in_deletion(item)
            ]

        async with use_client(self, "the sandboxes could not be listed") as client:
            return await retry_call(list_all)

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        await _import_sdk()
        from .client import use_client
        from .deletion import DELETE_SECONDS, delete_sandbox, find_sandbox, is_in_deletion

        async with use_client(self, f"sandbox {sandbox_id} could not be removed") as client:
            remote = await find_sandbox(client, sandbox_id, seconds=DELETE_SECONDS)
            if remote is None or is_in_deletion(remote):
                return False
            await delete_sandbox(remote)
            return True

    async def open_terminal(self, sandbox_id: str) -> int:
        """Open a shell with `ssh`. Raise RlmBatchError."""
        await _import_sdk()
        from .client import use_client
        from .deletion import find_sandbox
        from .shell import open_shell

        async with use_client(self, f"no shell could be opened in sandbox {sandbox_id}") as client:
            remote = await find_sandbox(client, sandbox_id)
            if remote is None:
                raise SandboxLost(f"the sandbox {sandbox_id} is gone")
            return await open_shell(remote)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        await _import_sdk()
        from .client import use_client
        from .environment import list_snapshots

        async with use_client(self, "the snapshots could not be listed") as client:
            return await list_snapshots(client, self.snapshot_ttl)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        await _import_sdk()
        from .client import use_client
        from .environment import delete_snapshot

        async with use_client(self, f"snapshot {snapshot_id} could not be deleted") as client:
            await delete_snapshot(client, snapshot_id)

    async def list_volumes(self) -> list[str]:
        await _import_sdk()
        from .client import use_client
        from .errors import retry_call

        async with use_client(self, "the volumes could not be listed") as client:
            volumes = await retry_call(client.sdk.volume.list)
        return sorted(volume.name for volume in volumes if volume.state not in DELETED_VOLUME_STATES)

    async def check(self) -> str:
        """Return a description of the sandboxes' source, after checking the API key. Raise ConfigurationError."""
        await _import_sdk()
        import daytona

        from .client import get_account_key, use_client
        from .errors import CALL_SECONDS, retry_call

        account = get_account_key(self)
        if account not in _accepted_accounts:
            try:
                async with use_client(self, "Daytona could not be asked") as client:
                    # No sandbox has these labels: a listing that is left early makes OpenTelemetry log a traceback.
                    query = daytona.ListSandboxesQuery(labels={**MANAGED_LABELS, "rlm-batch-run": "none"})
                    await retry_call(lambda: anext(client.sdk.list(query, CALL_SECONDS), None))
                _accepted_accounts.add(account)
            except ConfigurationError:
                raise
            except RlmBatchError as error:
                log.warning("%s", error)  # Daytona may answer when the first sandbox is opened.
        origin = f"image {self.image}" if self.image else f"snapshot {self.snapshot or 'of the account'}"
        address = (
            self.get_account_setting("api_url") or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        )
        return f"daytona ({urlsplit(address).netloc}, {origin})"

    async def fingerprint(self) -> dict[str, Any]:
        """Return the common settings plus the sandboxes' origin, resources and network access."""
        settings = await super().fingerprint()
        for name in ("snapshot", "image", "cpu", "memory", "disk", "network_allow_list", "domain_allow_list"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        return {**settings, "network_block_all": True} if self.network_block_all else settings

    def has_credentials(self) -> bool:
        """Return True if the block or the environment has a key."""
        names = ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")
        return self.get_account_setting("api_key") is not None or any(os.environ.get(name) for name in names)


async def _import_sdk() -> None:
    """Import the SDK and the modules that use it. A thread does it, because the import takes seconds."""
    module = sys.modules.get(f"{__package__}.creation")
    if module is None or not hasattr(module, "open_sandbox"):  # Another thread may be importing it.
        await asyncio.to_thread(import_module, ".creation", __package__)
