"""What the errors of Modal's client mean: which of ours one becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ...sandbox.errors import (
    ConfigurationError,
    QuotaExceeded,
    RlmBatchError,
    SandboxLost,
    SandboxStartError,
    VolumeError,
)
from .calls import THROTTLE_SECONDS


def map_error(error: Exception, failure: str) -> RlmBatchError:
    """Our error for one of the client's: `failure` is what could not be done."""
    import modal

    reason = get_last_line(error)
    exceptions = modal.exception
    if isinstance(error, exceptions.ResourceExhaustedError):
        details = getattr(error, "_grpc_details", None) or ()
        waits = [entry.retry_after_secs for entry in details if hasattr(entry, "retry_after_secs")]
        asked = f", and asks for {waits[0]:.1f} s more" if waits else ""
        limit = os.environ.get("MODAL_MAX_THROTTLE_WAIT", THROTTLE_SECONDS)
        return QuotaExceeded(
            f"{failure}: {reason} It was tried for {limit} s{asked}: use fewer workers, or ask Modal for a higher limit"
            if waits
            else f"{failure}: {reason} Use fewer workers, or ask Modal for a higher limit",
            retry_after=waits[0] if waits else None,
        )
    if isinstance(error, (exceptions.AuthError, exceptions.PermissionDeniedError)):
        return ConfigurationError(
            f"{failure}: {reason} Set token_id and token_secret of the block, or MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET, or run `modal token new`"
        )
    if isinstance(error, exceptions.ConflictError):
        return SandboxStartError(f"{failure}: {reason}")
    if isinstance(error, (exceptions.InvalidError, exceptions.VersionError, exceptions.UnimplementedError)):
        return ConfigurationError(f"{failure}: {reason}")
    return SandboxStartError(f"{failure}: {reason}")


def get_last_line(error: BaseException) -> str:
    """What an error says, in one line: of the many of a failed build the last is the complaint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__


@contextmanager
def map_file_errors(sandbox_id: str, failure: str) -> Iterator[None]:
    """Turns the client's errors about files into ours: VolumeError, SandboxLost."""
    import modal

    try:
        yield
    except modal.exception.SandboxFilesystemError as error:
        raise VolumeError(f"{failure}: {get_last_line(error)}") from error
    except modal.exception.Error as error:
        raise SandboxLost(f"{failure}, for sandbox {sandbox_id} has gone: {get_last_line(error)}") from error
