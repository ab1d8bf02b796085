"""What the SDK's errors mean: whether a call may be made again, and which of our errors one becomes."""

from __future__ import annotations

import re
from typing import Any

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from .sdk import get_sdk

# What it says of one that is being removed, or was stopped, comes from its proxy; what is not there its API says.
GONE = re.compile(r"Sandbox (with ID or name \S+ not found|\S+ is not started)")
NO_CAPACITY = re.compile(r"\b(limit|quota)s? (has been |is )?(exceeded|reached)", re.IGNORECASE)


def get_status(error: BaseException) -> int | None:
    """The HTTP status that a call was refused with, None where there was no answer."""
    return getattr(error, "status_code", None)


def get_message(error: BaseException) -> str:
    """The provider's own words, without what the SDK puts before them."""
    text = " ".join(str(error).split())
    return re.sub(r"^(Fail(ed|ure) [a-z ]+: )+", "", text)[:1000] or type(error).__name__


def says_gone(error: BaseException) -> bool:
    """Whether it says that the sandbox is no more, or is going."""
    return GONE.search(get_message(error)) is not None


def is_transient(error: Exception) -> bool:
    """Whether the same call may well succeed in a moment."""
    sdk, status = get_sdk(), get_status(error)
    if isinstance(error, sdk.DaytonaConnectionError):
        return True
    if status is None:  # what never was an answer; a client's own complaint is one of the named types
        return isinstance(error, sdk.DaytonaTimeoutError) or type(error) is sdk.DaytonaError
    return status == 429 or status >= 500 or status == 408


def is_unreachable(error: BaseException) -> bool:
    """Whether no connection could be made, so that nothing was sent."""
    import aiohttp

    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def get_retry_after(error: BaseException) -> float | None:
    """The seconds that a refusal asks for. Its header's name may end with that of the limit."""
    headers: dict[str, Any] = getattr(error, "headers", None) or {}
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            try:
                return max(0.0, float(value))
            except ValueError:
                continue
    return None


def map_error(error: BaseException, failure: str, snapshot: str | None = None) -> RlmBatchError:
    """Our error for one of the SDK's: `failure` is what could not be done, the provider's own message the reason."""
    status, message = get_status(error), get_message(error)
    if says_gone(error):
        return SandboxStartError(f"{failure}: it went away meanwhile ({message})")
    if status == 401:
        return ConfigurationError(
            f"Daytona refused the API key ({message}): set api_key on the block, or DAYTONA_API_KEY, to a valid one"
        )
    if status == 429:
        return QuotaExceeded(f"{failure}: Daytona refused for now ({message})", retry_after=get_retry_after(error))
    # What an exhausted account is refused with has no status and no code of its own.
    if status in (400, 402, 403) and NO_CAPACITY.search(message):
        return QuotaExceeded(
            f"{failure}: the account's resources are used up ({message}); wait for other sandboxes to end, use fewer "
            "workers, or raise the account's limits in Daytona's dashboard"
        )
    if status == 403:
        return ConfigurationError(f"{failure}: Daytona does not allow it ({message}); use a key that may")
    if status == 404 and snapshot is not None:
        return ConfigurationError(
            f"{failure}: Daytona has no snapshot {snapshot!r} ({message}); name one of the account's with snapshot"
        )
    if status in (400, 402, 404, 409, 422):
        return ConfigurationError(f"{failure}: Daytona refused the block's settings ({message}); change them")
    return SandboxStartError(f"{failure}: {message}")
