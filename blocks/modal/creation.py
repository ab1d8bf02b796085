"""The creation of a Modal sandbox, with the repository and the host's files in it."""

import asyncio
import logging
import uuid
from typing import Any

import modal

from ...sandbox.cancellation import announce_removal, run_shielded
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxStartError
from .. import git as repository
from ..host_files.files import ARCHIVE_PATH, UNPACK_ARCHIVE, HostFiles, describe_unpacking_failure
from .account import Account, get_volume, open_account, try_to_terminate
from .errors import convert_errors, get_last_line, map_error, retry_refused, retry_until_done
from .handle import ModalSandboxHandle
from .image import MIN_SANDBOXES, add_clone_to_image, build_image
from .settings import ModalSettings

CLONE_SECONDS = 600
MAX_LIFETIME = 86_400  # seconds; Modal's limit
UNPACK_SECONDS = 300

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

    Modal ends it `keep_seconds` after its lifetime, in which it may be kept.
    On an error or a cancellation, leave no sandbox. Raise the errors of `SandboxProvider.open`.
    """
    account, image, volume = await open_account(settings), await build_image(settings), await get_volume(settings)
    is_kept = settings.setup_snapshot == "always" or (settings.setup_snapshot == "auto" and expected >= MIN_SANDBOXES)
    if commit is not None and is_kept and (clone := await add_clone_to_image(settings, image, commit)) is not None:
        image, commit = clone, None
    memory, seconds = settings.memory_mib, min(settings.lifetime + keep_seconds, MAX_LIFETIME)
    options: dict[str, Any] = {
        "app": account.app,
        "tags": {key: value for key, value in labels.items() if value},
        "image": image,
        "timeout": seconds,
        "idle_timeout": settings.idle_timeout,
        "cpu": settings.cpu,
        "memory": None if memory is None else (memory, memory),
        "gpu": settings.gpu,
        "region": settings.region,
        "block_network": settings.block_network,
        "outbound_cidr_allowlist": settings.allowed_cidrs,
        "outbound_domain_allowlist": settings.allowed_domains,
        "volumes": {} if volume is None else {settings.volume_mount_path: volume},
        "client": account.client,
    }
    creating = asyncio.ensure_future(_create(settings, account, ("sleep", str(seconds)), options))
    try:
        sandbox = await asyncio.shield(creating)
    except asyncio.CancelledError:
        await run_shielded(_terminate_abandoned(creating, settings.has_sandbox_limit))
        raise
    handle = ModalSandboxHandle(sandbox, settings, files)
    try:
        if commit is not None:
            await _clone_repository(sandbox, settings, commit)
        if files.archive is not None:
            await _unpack_files(sandbox, files.archive)
    except BaseException:
        await run_shielded(handle.remove())
        raise
    return handle


async def _terminate_abandoned(creating: asyncio.Future[modal.Sandbox], wait: bool) -> None:
    """Wait for the end of an abandoned creation, and terminate its sandbox."""
    try:
        with announce_removal(log):
            sandbox = await creating
    except RlmBatchError:
        return
    await try_to_terminate(sandbox, wait=wait)


async def _create(
    settings: ModalSettings, account: Account, command: tuple[str, ...], options: dict[str, Any]
) -> modal.Sandbox:
    name = f"rlm-batch-{uuid.uuid4().hex[:20]}"
    try:
        async with asyncio.timeout(settings.start_timeout):
            return await modal.Sandbox.create.aio(*command, name=name, **options)
    except TimeoutError as error:
        failure: Exception = error
        reason = SandboxStartError(
            f"Modal did not open a sandbox within {settings.start_timeout} s: raise `start_timeout`"
        )
    except (ValueError, TypeError) as error:  # The client raises these before it sends anything.
        raise ConfigurationError(
            f"no sandbox could be opened: Modal's client refused the settings ({get_last_line(error)}): "
            "change the resources or the network"
        ) from error
    except modal.exception.Error as error:
        failure, reason = error, map_error(error, "no sandbox could be opened")
        if isinstance(error, (modal.exception.InvalidError, modal.exception.AuthError)):
            raise reason from error
    # If an answer was lost, a sandbox may exist. It may also exist after a refusal: the client itself retries, and its
    # first try may have created one. A sandbox that is not found here is idle, and Modal ends it after `idle_timeout`.
    try:
        return await retry_until_done(
            lambda: modal.Sandbox.from_name.aio(settings.app_name, name, client=account.client)
        )
    except modal.exception.Error:
        raise reason from failure


async def _clone_repository(sandbox: modal.Sandbox, settings: ModalSettings, commit: str) -> None:
    """Clone the repository. Raise ConfigurationError or SandboxStartError."""
    url = settings.repo_url or ""
    words = ("sh", "-c", repository.FETCH_COMMIT, "clone", settings.workdir, url, commit)
    environment = repository.build_environment(settings.repo_token)
    with convert_errors(f"{url} could not be cloned"):
        status, complaint = await _run(sandbox, *words, env=environment, timeout=CLONE_SECONDS)
    if status:
        raise repository.describe_clone_failure(url, commit, status, complaint)


async def _unpack_files(sandbox: modal.Sandbox, archive: bytes) -> None:
    """Upload an archive of the host's files and unpack it. Raise ConfigurationError or SandboxStartError."""
    words = ("sh", "-c", UNPACK_ARCHIVE, "unpack", ARCHIVE_PATH, "python")
    with convert_errors("the host's files could not be copied into the sandbox"):
        await retry_refused(lambda: sandbox.filesystem.write_bytes.aio(archive, ARCHIVE_PATH))
        status, complaint = await _run(sandbox, *words, timeout=UNPACK_SECONDS)
    if status:
        raise describe_unpacking_failure(complaint)


async def _run(sandbox: modal.Sandbox, *command: str, **options: Any) -> tuple[int, str]:
    """Run a command to its end; return its status and, if it failed, its standard error."""
    process: Any = await retry_refused(lambda: sandbox.exec.aio(*command, text=False, **options))
    status = await retry_refused(process.wait.aio)
    return status, "" if status == 0 else (await process.stderr.read.aio()).decode("utf-8", "replace")
