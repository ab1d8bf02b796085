"""What the SDK's errors mean: whether a call is made again, and which of our errors one becomes."""

import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import daytona

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.outcomes.server_message import extract_message
from ..retry import call_with_retries

T = TypeVar("T")

CALL_SECONDS = 30.0  # for one call's answer
SETUP_SECONDS = 1800.0  # for a clone, or for pip: some packages are compiled
TRIES = 7  # of a call that may be made twice; with the pauses between them some 7 s
GIVE_UP_SECONDS = 60.0  # without one call's success, or one reconnection's, after which a sandbox is taken for lost
LONGEST_DELAY_SECONDS = 20.0  # that a refused call waits where it is told to wait longer

# What it says of one that is being removed, or was stopped, comes from its proxy; what is not there its API says.
GONE = re.compile(r"Sandbox (with ID or name \S+ not found|\S+ is not started)")
NO_CAPACITY = re.compile(r"\b(limit|quota)s? (has been |is )?(exceeded|reached)", re.IGNORECASE)


def get_status(error: BaseException) -> int | None:
    """The HTTP status that a call was refused with, None where there was no answer."""
    return getattr(error, "status_code", None)


def get_message(error: BaseException) -> str:
    """The provider's own words, without what the SDK puts before them."""
    # Of an answer whose words are no text, but a list of them, the SDK passes them over.
    words = extract_message(str(getattr(error.__cause__, "body", None) or "")) or extract_message(str(error))
    text = " ".join(words.split())
    return re.sub(r"^(Fail(ed|ure) [a-z ]+:( |$))+", "", text)[:1000] or _describe_silence(error)


def _describe_silence(error: BaseException) -> str:
    """What is known of an error that has no words: a call that was waited for in vain is one."""
    if isinstance(error.__cause__, TimeoutError):
        return "no answer came in time"
    status = get_status(error)
    return f"status {status}" if status is not None else type(error.__cause__ or error).__name__


def says_gone(error: BaseException) -> bool:
    """Whether it says that the sandbox is no more, or is going."""
    return GONE.search(get_message(error)) is not None


def is_transient(error: Exception) -> bool:
    """Whether the same call may well succeed in a moment."""
    status = get_status(error)
    if isinstance(error, daytona.DaytonaConnectionError):
        return True
    if status is None:  # what never was an answer; a client's own complaint is one of the named types
        return isinstance(error, daytona.DaytonaTimeoutError) or type(error) is daytona.DaytonaError
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


def get_delay(error: Exception, attempt: int) -> float:
    """Seconds before the next attempt, the first being number 0: what the error asks for, or more each time."""
    asked = get_retry_after(error) or 0.0
    return max(min(asked, LONGEST_DELAY_SECONDS), min(0.1 * 2**attempt, 2.0)) * random.uniform(1.0, 1.5)


async def retry_call(
    call: Callable[[], Awaitable[T]],
    tries: int | None = None,
    *,
    is_passing: Callable[[Exception], bool] = is_transient,
) -> T:
    """Makes a call that may be made twice, and makes it again where it was lost. Raises the last DaytonaError.

    `is_passing` says which DaytonaErrors it is made again after.
    """

    def choose_delay(error: Exception, attempt: int) -> float | None:
        is_last = attempt + 1 >= (tries or TRIES)
        if is_last or not isinstance(error, daytona.DaytonaError) or not is_passing(error):
            return None
        return get_delay(error, attempt)

    return await call_with_retries(call, choose_delay)


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
