"""How a sandbox of Modal comes to be, and what is left where that fails."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import ConfigurationError, SandboxStartError
from .account import Account, get_account_key
from .errors import get_last_line, map_error
from .once import forget_made
from .settings import ModalSettings
from .termination import terminate_abandoned, terminate_named

if TYPE_CHECKING:
    import modal

CREATE_SECONDS = 600.0  # for the answer to a creation: Modal may be looking for a machine


async def create_sandbox(
    settings: ModalSettings,
    account: Account,
    image: modal.Image,
    volume: modal.Volume | None,
    labels: dict[str, str],
) -> modal.Sandbox:
    """A new sandbox. Raises what `open` raises, also when it is cancelled, and leaves none then."""
    creating = asyncio.ensure_future(_create(settings, account, image, volume, labels))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        await run_shielded(terminate_abandoned(creating, settings.has_sandbox_limit))
        raise


async def _create(
    settings: ModalSettings,
    account: Account,
    image: modal.Image,
    volume: modal.Volume | None,
    labels: dict[str, str],
) -> modal.Sandbox:
    import modal

    name = f"rlm-batch-{uuid.uuid4().hex[:20]}"
    memory = settings.memory_mib
    try:
        async with asyncio.timeout(CREATE_SECONDS):
            return await modal.Sandbox.create.aio(
                *("sleep", str(settings.lifetime)),
                app=account.app,
                name=name,
                tags={key: value for key, value in labels.items() if value},
                image=image,
                timeout=settings.lifetime,
                idle_timeout=settings.idle_timeout,
                cpu=settings.cpu,
                memory=None if memory is None else (memory, memory),
                gpu=settings.gpu,
                region=settings.region,
                block_network=settings.block_network,
                outbound_cidr_allowlist=settings.allowed_cidrs,
                outbound_domain_allowlist=settings.allowed_domains,
                volumes={} if volume is None else {settings.volume_mount_path: volume},
                client=account.client,
            )
    except TimeoutError:
        await terminate_named(settings, account, name)
        raise SandboxStartError(f"Modal did not open a sandbox within {CREATE_SECONDS:.0f} s") from None
    except (ValueError, TypeError) as error:  # of the client, before it sends anything
        raise ConfigurationError(
            f"no sandbox could be opened: Modal's client does not take the block's settings ({get_last_line(error)}); "
            "change its resources or its network"
        ) from error
    except modal.exception.ResourceExhaustedError as error:
        # Its client tries again by itself: what is refused may be a second try, whose first has opened one.
        await terminate_named(settings, account, name)
        raise map_error(error, "Modal opens no sandbox for now") from error
    except modal.exception.NotFoundError as error:
        forget_made(get_account_key(settings))  # the image or the volume has been removed since
        raise SandboxStartError(f"Modal has lost what a sandbox is made of: {get_last_line(error)}") from error
    except modal.exception.Error as error:
        if not isinstance(error, (modal.exception.InvalidError, modal.exception.AuthError)):
            await terminate_named(settings, account, name)
        raise map_error(error, "no sandbox could be opened") from error
