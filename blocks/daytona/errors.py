"""Handling of the SDK's errors: retries, and the conversion to errors of this package."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import daytona

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.outcomes.server_message import extract_message
from ..retry import call_with_retries, compute_backoff
from .error_table import TABLE, Meaning, Row

T = TypeVar("T")

CALL_SECONDS = 30.0  # seconds for an answer
SETUP_SECONDS = 1800.0  # seconds for a clone or for pip, which compiles some packages
TRIES = 7  # attempts of a repeatable call, which take about 7 s with the pauses
KEY_SECONDS = 3.0  # seconds after which a key that is refused again counts as wrong
GIVE_UP_SECONDS = 60.0  # seconds without a successful call or reconnection before a sandbox counts as lost
LONGEST_DELAY_SECONDS = 20.0  # upper limit of the seconds that a refusal can ask to wait
ENDED_STATES = (*("stopping", "stopped", "archiving", "archived", "destroying", "destroyed", "error", "build_failed"),)

UNKNOWN = Row((), "", Meaning.PASSING, "nothing is known of it")
REFUSED_REQUEST = Row((), "", Meaning.FINAL, "the sandbox's daemon, or the SDK, of what it was asked for")


def get_status(error: BaseException) -> int | None:
    """Return the HTTP status of a refused call; None if no answer arrived."""
    return getattr(error, "status_code", None)


def get_message(error: BaseException) -> str:
    """Return the provider's message, without the SDK's prefix."""
    # The SDK ignores an answer whose message is a list.
    words = extract_message(str(getattr(error.__cause__, "body", None) or "")) or extract_message(str(error))
    text = re.sub(r"^(Fail(ed|ure) [a-z ]+:( |$))+", "", " ".join(words.split()))[:1000]
    if text:
        return text
    if isinstance(error.__cause__, TimeoutError):
        return "no answer came in time"
    status = get_status(error)
    return f"status {status}" if status is not None else type(error.__cause__ or error).__name__


def find_row(error: BaseException) -> Row:
    """Return the table's row for an error.

    An unknown error is PASSING. It is FINAL if the sandbox's daemon, or the SDK itself, refused the request.
    """
    status, message = get_status(error), get_message(error)
    if status is None:  # No answer arrived. If the SDK rejects a request itself, it raises a subclass.
        is_lost = isinstance(error, (daytona.DaytonaConnectionError, daytona.DaytonaTimeoutError))
        return UNKNOWN if is_lost or type(error) is daytona.DaytonaError else REFUSED_REQUEST
    if status >= 500 or status == 408:
        return UNKNOWN
    for row in TABLE:
        if row.matches(status, message):
            return row
    # The error of an upload has the whole answer as its text.
    is_daemons = getattr(error, "source", None) == "DAYTONA_DAEMON" or '"source":"DAYTONA_DAEMON"' in str(error)
    return REFUSED_REQUEST if is_daemons else UNKNOWN


def says_gone(error: BaseException) -> bool:
    """Return True if the error says that the sandbox is gone or in deletion."""
    return find_row(error).meaning is Meaning.GONE


def is_transient(error: BaseException) -> bool:
    """Return True if repeating the call may soon succeed."""
    return find_row(error).meaning in (Meaning.PASSING, Meaning.MAYBE_GONE, Meaning.THROTTLED, Meaning.KEY)


def is_turned_away(error: BaseException) -> bool:
    """Return True if the error is transient and the call was refused before it had any effect."""
    return is_transient(error) and get_status(error) in range(400, 500)


def is_unreachable(error: BaseException) -> bool:
    """Return True if no connection could be made, so nothing was sent."""
    import aiohttp

    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def get_retry_after(error: BaseException) -> float | None:
    """Return the seconds that a refusal asks to wait. The header's name may end with the name of the limit."""
    headers: dict[str, Any] = getattr(error, "headers", None) or {}
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            try:
                return max(0.0, float(value))
            except ValueError:
                continue
    return None


def get_delay(error: Exception, attempt: int, longest: float = 2.0) -> float:
    """Return the seconds before the next attempt (counted from 0): what the error asks for, or an increasing delay."""
    asked = get_retry_after(error) or 0.0
    return max(min(asked, LONGEST_DELAY_SECONDS), compute_backoff(attempt, 0.1, longest)) * random.uniform(1.0, 1.5)


async def retry_call(
    call: Callable[[], Awaitable[T]],
    *,
    seconds: float = 0.0,
    tries: int | None = None,
    longest_delay: float = 2.0,
    remote: daytona.AsyncSandbox | None = None,
    is_passing: Callable[[Exception], bool] = is_transient,
) -> T:
    """Make a call that may be repeated, and retry it when it is lost or refused. Raise the last DaytonaError.

    Args:
        call: The call.
        seconds: Retry at least for this time.
        tries: Try at least this often; by default `TRIES` times.
        longest_delay: Upper limit of the delays, in seconds.
        remote: The sandbox that the call is for. Retrying stops when it is gone.
        is_passing: Decides which DaytonaErrors are retried. A refused key is retried only for `KEY_SECONDS`.
    """
    loop = asyncio.get_running_loop()
    give_up_at, key_refused_at, is_doubtful = loop.time() + seconds, 0.0, False

    async def make_call() -> T:
        if is_doubtful and remote is not None:
            await check_existence(remote)
        return await call()

    def choose_delay(error: Exception, attempt: int) -> float | None:
        nonlocal is_doubtful, key_refused_at
        if not isinstance(error, daytona.DaytonaError) or not is_passing(error):
            return None
        meaning, now, delay = find_row(error).meaning, loop.time(), get_delay(error, attempt, longest_delay)
        is_doubtful = meaning is Meaning.MAYBE_GONE
        if meaning is Meaning.KEY:
            key_refused_at = key_refused_at or now
            return delay if now + delay < key_refused_at + KEY_SECONDS else None
        is_over = attempt + 1 >= (tries or TRIES) and now + delay > give_up_at
        return None if is_over else delay

    return await call_with_retries(make_call, choose_delay)


def get_state(item: Any) -> str:
    """Return the state of a sandbox, volume or snapshot. The SDK passes on states that it does not know as text."""
    return str(getattr(item.state, "value", item.state))


async def check_existence(remote: daytona.AsyncSandbox) -> None:
    """Raise a DaytonaError with the meaning GONE if the sandbox's record says that it is not running."""
    try:
        await remote.refresh_data(CALL_SECONDS)
    except daytona.DaytonaError as error:
        if says_gone(error):
            raise
        return
    state = get_state(remote)
    if state in ENDED_STATES:
        raise daytona.DaytonaError(f"Sandbox {remote.id} is not started: it is {state}", status_code=409)


def map_error(error: BaseException, failure: str) -> RlmBatchError:
    """Convert an error of the SDK. `failure` says what could not be done; the provider's message gives the reason."""
    row, message = find_row(error), get_message(error)
    if row.meaning is Meaning.GONE:
        return SandboxStartError(f"{failure}: the sandbox disappeared meanwhile ({message})")
    if row.meaning is Meaning.THROTTLED:
        return QuotaExceeded(f"{failure}: Daytona refused temporarily ({message})", retry_after=get_retry_after(error))
    if row.meaning is Meaning.QUOTA:
        return QuotaExceeded(
            f"{failure}: the account's quota is used up ({message}): lower `max_workers`, "
            "wait for other sandboxes, or raise the quota in Daytona's dashboard"
        )
    if row.meaning is Meaning.KEY:
        refusal = "refused the API key" if get_status(error) == 401 else "does not allow that with this API key"
        return ConfigurationError(f"{failure}: Daytona {refusal} ({message}): {row.advice}")
    if row.meaning is Meaning.FINAL:
        advice = row.advice or "change the block's settings"
        return ConfigurationError(f"{failure}: Daytona refused it ({message}); {advice}")
    return SandboxStartError(f"{failure}: {message}")
