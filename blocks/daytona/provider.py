"""Daytona as a provider of sandboxes, through its SDK's asynchronous client.

The SDK is imported when the first sandbox is opened, because that takes seconds and a hundred megabytes once per
process. So the modules that use it are imported in the methods.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from ...sandbox.errors import ConfigurationError, RlmBatchError
from ...sandbox.sandbox_api import Sandbox
from ..provider import SandboxInfo, SandboxProvider, SnapshotInfo
from .settings import DaytonaSettings

if TYPE_CHECKING:
    import daytona

log = logging.getLogger("rlm_batch.daytona")


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
        async with self._use_client("the sandboxes could not be listed") as client:
            from .account import list_sandboxes

            return await list_sandboxes(client)

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        async with self._use_client(f"sandbox {sandbox_id} could not be removed") as client:
            from .account import find_and_delete_sandbox

            return await find_and_delete_sandbox(client, sandbox_id)

    async def open_terminal(self, sandbox_id: str) -> int:
        """Open a shell with `ssh`. Raise RlmBatchError."""
        async with self._use_client(f"no shell could be opened in sandbox {sandbox_id}") as client:
            from .account import open_shell

            return await open_shell(client, sandbox_id)

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
            from .account import list_volumes

            return await list_volumes(client)

    async def check(self) -> str:
        """Return a description of the sandboxes' source, after checking the API key. Raise ConfigurationError."""
        try:
            async with self._use_client("Daytona could not be asked") as client:
                from .account import list_sandboxes

                # No sandbox has this label, so the list is short.
                await list_sandboxes(client, {"rlm-batch-run": "none"})
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

    @asynccontextmanager
    async def _use_client(self, failure: str) -> "AsyncIterator[daytona.AsyncDaytona]":
        """Borrow the client for one call. Convert DaytonaErrors; `failure` says what could not be done."""
        await _import_sdk()
        from .client import use_client

        async with use_client(self, failure) as client:
            yield client


async def _import_sdk() -> None:
    """Import the SDK and the modules that use it. A thread does it, because the import takes seconds."""
    await asyncio.to_thread(import_module, ".creation", __package__)
