"""Modal as a provider of sandboxes, through Modal's own client.

The client is imported when it is first needed: that takes 0.6 s. Its calls are made by their `.aio` form throughout,
for the plain ones would block the loop. What was read in the client, release 1.6, and is relied upon:
- the standard input of a command loses what is written while it drains: one lock around both;
- a command cannot be ended but by its own deadline or with its sandbox, and its arguments are 64 KiB at most;
- a call that is refused with a time to wait is tried again for ever unless MODAL_MAX_THROTTLE_WAIT is set.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, ClassVar

from ...sandbox.cancellation import run_shielded
from ..provider import SandboxInfo, SandboxProvider
from ..sandbox_volume import SandboxVolume
from .account import build_image, get_volume, open_account
from .clone import clone_repository
from .creation import create_sandbox
from .errors import map_error
from .handle import ModalSandboxHandle
from .settings import PYTHON, ModalSettings
from .termination import terminate_sandbox

MANAGED_LABELS = {"managed-by": "rlm-batch"}


class ModalProvider(ModalSettings, SandboxProvider):
    """Opens, lists and terminates sandboxes of a Modal app."""

    provider_name: ClassVar[str] = "modal"

    def has_credentials(self) -> bool:
        """Whether it has a token, or Modal's own configuration has."""
        if self.token_id is not None and self.token_secret is not None:
            return True
        from modal.config import config

        return bool(config.get("token_id") and config.get("token_secret")) or bool(
            os.environ.get("MODAL_OAUTH_REFRESH_TOKEN")
        )

    async def open(self, labels: dict[str, str]) -> ModalSandboxHandle:
        """Opens a sandbox, with the repository in it; see `SandboxProvider.open`."""
        account, image, volume = await open_account(self), await build_image(self), await get_volume(self)
        commit = await self.commit()
        sandbox = await create_sandbox(self, account, image, volume, labels)
        handle = ModalSandboxHandle(sandbox, self)
        if commit is not None:
            try:
                await clone_repository(sandbox, self, commit)
            except BaseException:
                await run_shielded(handle.remove())
                raise
        return handle

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes of the app that carry our labels."""
        import modal

        account = await open_account(self)
        sandboxes: list[SandboxInfo] = []
        try:
            async for sandbox in modal.Sandbox.list.aio(
                app_id=account.app.app_id, tags=MANAGED_LABELS, client=account.client
            ):
                with suppress(modal.exception.NotFoundError):  # it has ended meanwhile
                    sandboxes.append(SandboxInfo(sandbox.object_id, await sandbox.get_tags.aio()))
        except modal.exception.Error as error:
            raise map_error(error, "sandboxes could not be listed") from error
        return sandboxes

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Terminates the sandbox."""
        import modal

        account = await open_account(self)
        try:
            await terminate_sandbox(await modal.Sandbox.from_id.aio(sandbox_id, client=account.client))
        except modal.exception.NotFoundError:
            pass
        except modal.exception.Error as error:
            raise map_error(error, f"sandbox {sandbox_id} could not be removed") from error

    async def check(self) -> str:
        """That the token is good; which app sandboxes belong to."""
        account = await open_account(self)
        return f"Modal's own sandboxes, of its app {self.app_name} ({account.app.app_id})"

    async def open_volume(self, name: str) -> SandboxVolume:
        """The volume of that name, reached from a sandbox."""
        return SandboxVolume(self, name)

    async def fingerprint(self) -> dict[str, Any]:
        """The common settings, the image, the resources and the network."""
        settings = {**await super().fingerprint(), "image": self.image or f"debian, python {PYTHON}"}
        for name in ("cpu", "memory_mib", "gpu", "block_network", "allowed_domains", "allowed_cidrs"):
            if value := getattr(self, name):
                settings[name] = value
        return settings
