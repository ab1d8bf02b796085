"""Daytona as a provider of sandboxes, through its SDK's asynchronous client."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import PrivateAttr

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError
from ..provider import SandboxInfo, SandboxProvider
from ..sandbox_volume import SandboxVolume
from .calls import CALL_SECONDS, retry_call
from .client import SharedClient, borrow_client
from .creation import create_sandbox
from .errors import map_error
from .handle import DaytonaSandboxHandle
from .inventory import delete_sandbox, find_sandbox
from .sdk import get_sdk
from .settings import DaytonaSettings

MANAGED_LABELS = {"managed-by": "rlm-batch"}

log = logging.getLogger("rlm_batch.daytona")


class DaytonaProvider(DaytonaSettings, SandboxProvider):
    """Opens, lists and deletes sandboxes of a Daytona account."""

    _is_key_accepted: bool = PrivateAttr(default=False)  # the account has been asked once
    provider_name: ClassVar[str] = "daytona"

    async def open(self, labels: dict[str, str]) -> DaytonaSandboxHandle:
        """Opens a sandbox, clones the repository into it and installs the packages.

        Raises ConfigurationError, QuotaExceeded or SandboxStartError; what was created has been removed then.
        """
        commit = await self.commit()
        client = await self._borrow_client()
        try:
            remote = await create_sandbox(self, client, labels)
        except BaseException:
            client.release()
            raise
        handle = DaytonaSandboxHandle(self, client, remote)
        try:
            if commit is not None:
                await handle.clone(commit)
            if self.packages:
                await handle.install(self.packages)
        except BaseException as error:
            await run_shielded(handle.remove())
            if isinstance(error, get_sdk().DaytonaError):
                raise self._map_error(error, "the sandbox could not be set up") from error
            raise
        return handle

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes of the account that carry our labels."""

        async def list_all() -> list[SandboxInfo]:
            query = get_sdk().ListSandboxesQuery(labels=MANAGED_LABELS)
            return [SandboxInfo(item.id, dict(item.labels)) async for item in client.sdk.list(query, CALL_SECONDS)]

        client = await self._borrow_client()
        try:
            return await retry_call(list_all)
        except get_sdk().DaytonaError as error:
            raise self._map_error(error, "the sandboxes could not be listed") from error
        finally:
            client.release()

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Removes a sandbox of the account."""
        client = await self._borrow_client()
        try:
            remote = await find_sandbox(client, sandbox_id)
            if remote is not None:
                await delete_sandbox(remote)
        except get_sdk().DaytonaError as error:
            raise self._map_error(error, f"sandbox {sandbox_id} could not be removed") from error
        finally:
            client.release()

    async def check(self) -> str:
        """Where sandboxes come from, once the account has accepted the key. Raises ConfigurationError."""
        if not self._is_key_accepted:
            client = await self._borrow_client()
            try:
                query = get_sdk().ListSandboxesQuery(labels=MANAGED_LABELS, limit=1)
                await retry_call(lambda: anext(client.sdk.list(query, CALL_SECONDS), None))
                self._is_key_accepted = True
            except get_sdk().DaytonaError as error:
                mapped = self._map_error(error, "Daytona could not be asked")
                if isinstance(mapped, ConfigurationError):
                    raise mapped from error
                log.warning("%s", mapped)  # it may answer when the first sandbox is opened
            finally:
                client.release()
        origin = f"image {self.image}" if self.image else f"snapshot {self.snapshot or 'of the account'}"
        address = self.api_url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        return f"daytona ({urlsplit(address).netloc}, {origin})"

    async def open_volume(self, name: str) -> SandboxVolume:
        """The volume of that name, reached from a sandbox."""
        return SandboxVolume(self, name)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings, and what the sandboxes are made of and may reach."""
        settings = await super().fingerprint()
        for name in ("snapshot", "image", "cpu", "memory", "disk", "network_allow_list", "domain_allow_list"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        return {**settings, "network_block_all": True} if self.network_block_all else settings

    def has_credentials(self) -> bool:
        """Whether there is a key on the block or in the environment."""
        return self.api_key is not None or any(
            os.environ.get(name) for name in ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")
        )

    async def _borrow_client(self) -> SharedClient:
        key = self.api_key.get_secret_value() if self.api_key is not None else None
        try:
            return await borrow_client((key, self.api_url, self.target))
        except get_sdk().DaytonaAuthenticationError as error:
            raise ConfigurationError(
                "no credentials for Daytona: set api_key on the block, or the environment variable DAYTONA_API_KEY"
            ) from error

    def _map_error(self, error: BaseException, failure: str) -> RlmBatchError:
        return map_error(error, failure, self.snapshot)
