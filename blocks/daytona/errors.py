"""What the SDK's errors mean: whether a call is made again, and which of our errors one becomes."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import daytona

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.outcomes.server_message import extract_message
from ..retry import call_with_retries
from .error_table import TABLE, Meaning, Row

T = TypeVar("T")

CALL_SECONDS = 30.0  # for one call's answer
SETUP_SECONDS = 1800.0  # for a clone, or for pip: some packages are compiled
TRIES = 7  # of a call that may be made twice; with the pauses between them some 7 s
KEY_SECONDS = 3.0  # between two refusals of a key, after which it is wrong
GIVE_UP_SECONDS = 60.0  # without one call's success, or one reconnection's, after which a sandbox is taken for lost
LONGEST_DELAY_SECONDS = 20.0  # that a refused call waits where it is told to wait longer

UNKNOWN = Row((), "", Meaning.PASSING, "nothing is known of it")
REFUSED_REQUEST = Row((), "", Meaning.FINAL, "the sandbox's daemon, or the SDK, of what it was asked for")


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


def find_row(error: BaseException) -> Row:
    """The row of the table that says what an error means; one that means PASSING where the table does not know it."""
    status, message = get_status(error), get_message(error)
    if status is None:  # what never was an answer; a client's own complaint is one of the named types
        is_lost = isinstance(error, (daytona.DaytonaConnectionError, daytona.DaytonaTimeoutError))
        return UNKNOWN if is_lost or type(error) is daytona.DaytonaError else REFUSED_REQUEST
    if status >= 500 or status == 408:
        return UNKNOWN
    for row in TABLE:
        if row.matches(status, message):
            return row
    # Of an upload the SDK hands on the answer as it came.
    is_daemons = getattr(error, "source", None) == "DAYTONA_DAEMON" or '"source":"DAYTONA_DAEMON"' in str(error)
    return REFUSED_REQUEST if is_daemons else UNKNOWN


def says_gone(error: BaseException) -> bool:
    """Whether it says that the sandbox is no more, or is going."""
    return find_row(error).meaning is Meaning.GONE


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well succeed in a moment."""
    return find_row(error).meaning in (Meaning.PASSING, Meaning.MAYBE_GONE, Meaning.THROTTLED, Meaning.KEY)


def is_turned_away(error: BaseException) -> bool:
    """Whether the same call may well succeed in a moment, and this one was refused before anything was done."""
    return is_transient(error) and get_status(error) in range(400, 500)


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


def get_delay(error: Exception, attempt: int, longest: float = 2.0) -> float:
    """Seconds before the next attempt, the first being number 0: what the error asks for, or more each time."""
    asked = get_retry_after(error) or 0.0
    return max(min(asked, LONGEST_DELAY_SECONDS), min(0.1 * 2**attempt, longest)) * random.uniform(1.0, 1.5)


class KeyRefusals:
    """Tells a key that is wrong from one that was refused for a moment: it is refused again some seconds later."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def choose_delay(self) -> float | None:
        """Seconds after which to ask again whether the key is refused; None where it is wrong."""
        now = asyncio.get_running_loop().time()
        if self._first_at is None:
            self._first_at = now
            return min(0.5, KEY_SECONDS)
        rest = self._first_at + KEY_SECONDS - now
        return rest if rest > 0 else None


async def retry_call(
    call: Callable[[], Awaitable[T]],
    tries: int | None = None,
    *,
    seconds: float = 0.0,
    remote: daytona.AsyncSandbox | None = None,
    is_passing: Callable[[Exception], bool] | None = None,
) -> T:
    """What a call returns that may be made twice: where it was lost or refused it is made again.

    It is made `tries` times at least, and for so many seconds. `remote` is the sandbox that it is to: where that is no
    more there is no further try. `is_passing` says after which DaytonaErrors it is made again: by default those that
    are transient, while a key that is refused is asked about for some seconds only. Raises the last DaytonaError.
    """
    loop = asyncio.get_running_loop()
    give_up_at, key_refusals, is_doubtful = loop.time() + seconds, KeyRefusals(), False

    async def make_call() -> T:
        if is_doubtful and remote is not None:
            await check_existence(remote)
        return await call()

    def choose_delay(error: Exception, attempt: int) -> float | None:
        nonlocal is_doubtful
        if not isinstance(error, daytona.DaytonaError) or not (is_passing or is_transient)(error):
            return None
        meaning = find_row(error).meaning
        is_doubtful = meaning is Meaning.MAYBE_GONE
        if meaning is Meaning.KEY and is_passing is None:
            return key_refusals.choose_delay()
        delay = get_delay(error, attempt)
        is_over = attempt + 1 >= (tries or TRIES) and loop.time() + delay > give_up_at
        return None if is_over else delay

    return await call_with_retries(make_call, choose_delay)


async def check_existence(remote: daytona.AsyncSandbox) -> None:
    """Raises a DaytonaError that means GONE where the sandbox's own record says that it is not running any more."""
    try:
        await remote.refresh_data(CALL_SECONDS)
    except daytona.DaytonaError as error:
        if says_gone(error):
            raise
        return
    state = str(getattr(remote.state, "value", remote.state))
    if state in ("stopping", "stopped", "archiving", "archived", "destroying", "destroyed", "error"):
        raise daytona.DaytonaError(f"Sandbox {remote.id} is not started: it is {state}", status_code=409)


def map_error(error: BaseException, failure: str) -> RlmBatchError:
    """Our error for one of the SDK's: `failure` is what could not be done, the provider's own message the reason."""
    row, message = find_row(error), get_message(error)
    if row.meaning is Meaning.GONE:
        return SandboxStartError(f"{failure}: it went away meanwhile ({message})")
    if row.meaning is Meaning.THROTTLED:
        return QuotaExceeded(f"{failure}: Daytona refused for now ({message})", retry_after=get_retry_after(error))
    if row.meaning is Meaning.QUOTA:
        return QuotaExceeded(
            f"{failure}: the account's resources are used up ({message}); wait for other sandboxes to end, use fewer "
            "workers, or raise the account's limits in Daytona's dashboard"
        )
    if row.meaning is Meaning.KEY:
        refusal = "refused the API key" if get_status(error) == 401 else "does not allow that with this API key"
        return ConfigurationError(f"{failure}: Daytona {refusal} ({message}): {row.advice}")
    if row.meaning is Meaning.FINAL:
        advice = row.advice or "change the block's settings"
        return ConfigurationError(f"{failure}: Daytona refused it ({message}); {advice}")
    return SandboxStartError(f"{failure}: {message}")
