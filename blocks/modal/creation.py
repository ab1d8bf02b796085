"""The creation of a Modal sandbox, with the repository and the host's files in it."""

import asyncio
import logging
import uuid
from typing import Any

import modal

from ...sandbox.cancellation import announce_removal, run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxStartError
from ..host_files.files import HostFiles
from .account import Account, get_volume, open_account, try_to_terminate
from .errors import convert_errors, get_last_line, map_error, retry_until_done
from .handle import ModalSandboxHandle
from .image import add_clone_to_image, build_image
from .settings import ModalSettings

MAX_LIFETIME = 86_400  # seconds; Modal's limit

log = logging.getLogger("rlm_batch.modal")


async def open_sandbox(
    settings: ModalSettings,
    labels: dict[str, str],
    commit: str | None,
    files: HostFiles,
    expected: int = 1,
    *,
    keep_seconds: int = 0,
) -> ModalSandboxHandle:
    """Create a sandbox. If several are `expected`, the repository is part of its image.

    Modal ends the sandbox `keep_seconds` after its lifetime, so that it can be kept for this time. On an error or a
    cancellation, leave no sandbox. Raise the errors of `SandboxProvider.open`.
    """
    account = await open_account(settings)
    image = await build_image(settings)
    volume = await get_volume(settings)  # A wrong volume must not cost the build of the repository's image.
    if commit is not None and settings.keeps_set_up(expected):
        image_with_clone = await add_clone_to_image(settings, image, commit)
        if image_with_clone is not None:
            image = image_with_clone
            commit = None  # The sandbox has the repository already.
    options = build_options(settings, labels, volume)
    options |= {"app": account.app, "client": account.client, "image": image}
    seconds = min(settings.lifetime + keep_seconds, MAX_LIFETIME)
    creating = asyncio.ensure_future(_create(settings, account, seconds, options))
    try:
        sandbox = await asyncio.shield(creating)
    except asyncio.CancelledError:
        await run_shielded(_terminate_abandoned(creating, settings.has_sandbox_limit))
        raise
    handle = ModalSandboxHandle(sandbox, settings, files)
    try:
        with convert_errors("the sandbox could not be set up"):
            if commit is not None:
                await handle.clone_repository(commit)
            await handle.unpack_files()
    except BaseException:
        await run_shielded(handle.remove())
        raise
    return handle


def build_options(settings: ModalSettings, labels: dict[str, str], volume: modal.Volume | None) -> dict[str, Any]:
    """Return the options of a sandbox's creation that follow from the settings."""
    memory = settings.memory_mib
    return {
        "tags": {name: value for name, value in labels.items() if value},
        "idle_timeout": settings.idle_timeout,
        "cpu": settings.cpu,
        "memory": None if memory is None else (memory, memory),
        "gpu": settings.gpu,
        "region": settings.region,
        "block_network": settings.block_network,
        "outbound_cidr_allowlist": settings.allowed_cidrs,
        "outbound_domain_allowlist": settings.allowed_domains,
        "volumes": {} if volume is None else {settings.volume_mount_path: volume},
    }


async def _terminate_abandoned(creating: asyncio.Future[modal.Sandbox], wait: bool) -> None:
    """Wait for the end of an abandoned creation, and terminate its sandbox."""
    try:
        with announce_removal(log):
            sandbox = await creating
    except RlmBatchError:
        return  # The creation failed, so there is nothing to terminate.
    await try_to_terminate(sandbox, wait=wait)


async def _create(settings: ModalSettings, account: Account, seconds: int, options: dict[str, Any]) -> modal.Sandbox:
    """Create a sandbox that ends after `seconds`. Raise ConfigurationError, QuotaExceeded or SandboxStartError."""
    name = f"rlm-batch-{uuid.uuid4().hex[:20]}"
    try:
        async with asyncio.timeout(settings.start_timeout):
            return await modal.Sandbox.create.aio("sleep", str(seconds), name=name, timeout=seconds, **options)
    except (ValueError, TypeError) as error:  # The client raises these before it sends anything.
        raise ConfigurationError(
            f"no sandbox could be opened: Modal's client refused the settings ({get_last_line(error)}): "
            "change the resources or the network"
        ) from error
    except (TimeoutError, modal.exception.Error) as error:
        failure = _map_creation_error(error, settings)
        if isinstance(error, (modal.exception.InvalidError, modal.exception.AuthError)):
            raise failure from error  # Modal created no sandbox.
        # If an answer was lost, a sandbox may exist. It may also exist after a refusal: the client itself retries, and
        # its first try may have created one. A sandbox that is not found here is idle, and Modal ends it after
        # `idle_timeout`.
        try:
            return await retry_until_done(
                lambda: modal.Sandbox.from_name.aio(settings.app_name, name, client=account.client)
            )
        except modal.exception.Error:
            raise failure from error


def _map_creation_error(error: Exception, settings: ModalSettings) -> RlmBatchError:
    if isinstance(error, TimeoutError):
        return SandboxStartError(
            f"Modal did not open a sandbox within {settings.start_timeout} s: raise `start_timeout`"
        )
    return map_error(error, "no sandbox could be opened")
