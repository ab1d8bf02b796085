"""Modal as a provider of sandboxes, through Modal's own client.

The client is imported on first use, because the import takes 0.6 s. All calls use their `.aio` form, because the plain
form would block the event loop. The code relies on this behaviour of the client, read in release 1.6:
- A command's standard input loses bytes that are written while it drains, so one lock covers writing and draining.
- A command ends only by its own deadline or with its sandbox, and its arguments are limited to 64 KiB.
- If Modal refuses a call and names a time to wait, the client retries for ever, unless MODAL_MAX_THROTTLE_WAIT is set.
"""

import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from ...sandbox.driver_settings import KEEP_SECONDS
from ...sandbox.sandbox_api import Sandbox
from ..host_terminal import SHELL, run_in_terminal
from ..provider import MANAGED_LABELS, SandboxInfo, SandboxProvider
from .settings import PYTHON, TOKEN_SETTINGS, ModalSettings

if TYPE_CHECKING:
    from .account import Account


class ModalProvider(ModalSettings, SandboxProvider):
    """The provider for sandboxes of a Modal app."""

    provider_name: ClassVar[str] = "modal"
    result_settings: ClassVar[tuple[str, ...]] = (
        "cpu", "memory_mib", "gpu", "block_network", "allowed_domains", "allowed_cidrs",
    )  # fmt: skip

    def has_credentials(self) -> bool:
        """Return True if the block or Modal's own configuration has a token."""
        if all(self.get_account_setting(name) is not None for name in TOKEN_SETTINGS):
            return True
        from modal.config import config

        has_token = config.get("token_id") and config.get("token_secret")
        return bool(has_token or os.environ.get("MODAL_OAUTH_REFRESH_TOKEN"))

    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Open a sandbox with the repository in it; see `SandboxProvider.open`."""
        from .creation import open_sandbox

        commit = await self.commit()
        keep_seconds = int(KEEP_SECONDS) if self._keeps_failed else 0
        return await open_sandbox(
            self, labels, commit, self._files, self._expected_sandboxes, keep_seconds=keep_seconds
        )

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """List the app's sandboxes that carry this package's labels."""
        import modal

        sandboxes: list[SandboxInfo] = []
        async with self._use_account("sandboxes could not be listed") as account:
            listing = modal.Sandbox.list.aio(app_id=account.app.app_id, tags=MANAGED_LABELS, client=account.client)
            for sandbox in [item async for item in listing]:
                with suppress(modal.exception.NotFoundError):  # The sandbox may have ended since.
                    sandboxes.append(SandboxInfo(sandbox.object_id, await sandbox.get_tags.aio()))
        return sandboxes

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        import modal

        from .account import terminate_sandbox

        async with self._use_account(f"sandbox {sandbox_id} could not be removed") as account:
            with suppress(modal.exception.NotFoundError):
                sandbox = await modal.Sandbox.from_id.aio(sandbox_id, client=account.client)
                is_open = sandbox.returncode is None
                await terminate_sandbox(sandbox)
                return is_open
        return False

    async def open_terminal(self, sandbox_id: str) -> int:
        """Open a shell with `modal shell`, which gets the account's token in its environment."""
        environment: dict[str, str] = {}
        for name in TOKEN_SETTINGS:
            value = self.reveal_account_setting(name)
            if value is not None:
                environment[f"MODAL_{name.upper()}"] = value
        search_path = f"{os.environ.get('PATH', '')}:{os.path.dirname(sys.executable)}"
        program = shutil.which("modal", path=search_path) or "modal"
        command = [program, "shell", sandbox_id, "--cmd", shlex.join(SHELL)]
        return await run_in_terminal(command, f"modal shell {sandbox_id}", environment=environment)

    async def list_volumes(self) -> list[str]:
        import modal

        async with self._use_account("the volumes could not be listed") as account:
            volumes = await modal.Volume.objects.list.aio(client=account.client)
        return sorted(volume.name for volume in volumes if volume.name is not None)

    async def check(self) -> str:
        """Return the app of the sandboxes, after checking the token."""
        async with self._use_account("the account could not be opened") as account:
            return f"Modal's own sandboxes, of its app {self.app_name} ({account.app.app_id})"

    async def fingerprint(self) -> dict[str, Any]:
        """Return the common settings and the image."""
        return {**await super().fingerprint(), "image": self.image or f"debian, python {PYTHON}"}

    @asynccontextmanager
    async def _use_account(self, failure: str) -> "AsyncIterator[Account]":
        """Yield the client and its app, and convert Modal's errors. `failure` says what could not be done."""
        from .account import open_account
        from .errors import convert_errors

        account = await open_account(self)
        with convert_errors(failure):
            yield account
