"""Handling of the client's errors: retries, and the conversion to errors of this package."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import modal
from modal.config import config

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.outcomes.server_message import extract_message
from ..retry import call_with_retries, compute_backoff

T = TypeVar("T")

THROTTLE_SECONDS = 60  # seconds for which a refused call is retried, unless MODAL_MAX_THROTTLE_WAIT is set
RETRIES = 5  # retries of a call that must succeed


async def retry_refused(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that may be repeated, and retry it while Modal refuses it, for a limited time."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + float(config.get("max_throttle_wait") or 0)

    def choose_delay(error: Exception, attempt: int) -> float | None:
        delay = compute_backoff(attempt, 0.1, 5.0) * random.uniform(1.0, 1.5)
        is_refused = isinstance(error, modal.exception.ResourceExhaustedError)
        return delay if is_refused and loop.time() + delay <= give_up_at else None

    return await call_with_retries(call, choose_delay)


async def retry_until_done(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call, and retry it after any error of the client except NotFoundError. Raise the last error."""

    def choose_delay(error: Exception, attempt: int) -> float | None:
        is_final = not isinstance(error, modal.exception.Error) or isinstance(error, modal.exception.NotFoundError)
        return None if is_final or attempt == RETRIES else compute_backoff(attempt, 0.25)

    return await call_with_retries(call, choose_delay)


@contextmanager
def convert_errors(failure: str) -> Iterator[None]:
    """Convert errors of the client. `failure` says what could not be done."""
    try:
        yield
    except modal.exception.Error as error:
        raise map_error(error, failure) from error


def map_error(error: Exception, failure: str) -> RlmBatchError:
    """Convert an error of the client. `failure` says what could not be done."""
    text = f"{failure}: {get_last_line(error)}"
    exceptions = modal.exception
    if isinstance(error, exceptions.ResourceExhaustedError):
        retry_after = None
        for detail in getattr(error, "_grpc_details", None) or ():
            retry_after = getattr(detail, "retry_after_secs", retry_after)
        return QuotaExceeded(f"{text} Lower `max_workers`, or ask Modal for a higher limit", retry_after=retry_after)
    if isinstance(error, (exceptions.AuthError, exceptions.PermissionDeniedError)):
        remedy = "run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
        return ConfigurationError(f"{text.rstrip('.')}: {remedy}")
    if isinstance(error, exceptions.ImageBuildError):
        image = getattr(error, "image_id", "IMAGE_ID")
        return ConfigurationError(f"{text}; correct `image`, `setup` or `packages` (its log: modal image logs {image})")
    # A ConflictError is an InvalidError, but its cause is another call, not the settings.
    if isinstance(error, exceptions.ConflictError):
        return SandboxStartError(text)
    if isinstance(error, (exceptions.InvalidError, exceptions.VersionError, exceptions.UnimplementedError)):
        return ConfigurationError(text)
    return SandboxStartError(text)


def get_last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which is the reason for a failed build, or else its type's name."""
    lines = [line.strip() for line in extract_message(str(error)).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__
