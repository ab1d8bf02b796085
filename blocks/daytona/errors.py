"""Daytona's refusals: their meaning, the retries of calls, and the conversion to errors of this package.

The status alone is not enough. Daytona answers 400, 401 and 404 also when a machine is missing, when a sandbox has just
started, and when its own services cannot reach each other. So a refusal counts as an error of the block only if a row
of `TABLE` says so. Unknown refusals by the API or its proxy count as transient, such as those of a busy machine or of a
name that a lost call has taken. Unknown refusals by a sandbox's daemon count as final.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import daytona

from ...sandbox.errors import ConfigurationError, QuotaExceeded, RlmBatchError, SandboxStartError
from ...sandbox.outcomes.server_message import extract_message
from ..retry import compute_backoff

T = TypeVar("T")

CALL_SECONDS = 30.0  # seconds for an answer
SETUP_SECONDS = 1800.0  # seconds for a clone or for pip, which compiles some packages
TRIES = 7  # attempts of a repeatable call, which take about 7 s with the pauses
KEY_SECONDS = 3.0  # seconds after which a key that is refused again counts as wrong
GIVE_UP_SECONDS = 60.0  # seconds without a successful call or reconnection before a sandbox counts as lost
LONGEST_WAIT_SECONDS = 20.0  # upper limit of the seconds that a refusal can ask to wait
ENDED_STATES = (
    "stopping", "stopped", "archiving", "archived", "destroying", "destroyed", "error", "build_failed",
)  # fmt: skip


class Meaning(Enum):
    """The consequence of a refusal."""

    PASSING = "the same call may succeed in a moment, so it is retried"
    GONE = "the sandbox, or a session or command in it, has ended"
    THROTTLED = "too many calls: the call is retried after the time that the response names"
    QUOTA = "other sandboxes use the quota: wait until some of them have ended"
    KEY = "the key was refused: a key that is refused again some seconds later is wrong"
    FINAL = "every attempt will be refused: the request has to change"


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of refusal: its statuses, a pattern in its message (case-insensitive), and its meaning.

    The source is the name of a file of github.com/daytonaio/daytona at release 0.190 (the last with published code), an
    issue of that repository (#NUMBER), or a measurement of the service. `advice` says what to change, if that is
    certain.
    """

    statuses: tuple[int, ...]
    pattern: str
    meaning: Meaning
    source: str
    advice: str = ""


PASSING, GONE, THROTTLED, QUOTA, KEY, FINAL = Meaning
SNAPSHOT_ADVICE = "set snapshot to one of the account's"
STATE_ADVICE = f"activate it in Daytona's dashboard, or {SNAPSHOT_ADVICE}"
RESOURCES_ADVICE = "lower cpu, memory or disk, or use another snapshot"
KEY_ADVICE = "set DAYTONA_API_KEY, or api_key of the block, to a valid key"
NETWORK = "Invalid (IP address|network format|CIDR prefix|domain)|allow list cannot contain"
FILE = "no such file|file not found|permission denied|is a directory|not a directory|path must be a file"
API = "sandbox.service.ts"

# The first matching row counts.
TABLE: tuple[Row, ...] = (
    Row((429,), "", THROTTLED, "authenticated-rate-limit.guard.ts"),
    # The proxy also refuses a valid key if the API did not respond.
    Row((401,), "authentication failed: |Bearer token (validation error|is invalid)", PASSING, "auth.go, #5136"),
    Row((400, 404), "Sandbox with ID( or name)? .+ not found", GONE, API),
    Row((400, 404, 409), r"Sandbox \S+ is not started", GONE, "measured: one that was stopped"),
    Row((404,), "(session|command) not found", GONE, "command.go"),
    Row((410,), "", GONE, "input.go"),
    Row((400, 403, 404), FILE, FINAL, "apps/daemon/pkg/toolbox/fs"),
    # Snapshots and volumes
    Row((400, 404), r"Snapshot \S+ (not found|is not available in region)", FINAL, API, SNAPSHOT_ADVICE),
    Row((400,), r"Snapshot \S+ is (inactive|error|build_failed|removing)\b", FINAL, API, STATE_ADVICE),
    Row((400,), "Volume quota exceeded", FINAL, "volume.service.ts", "delete volumes in Daytona's dashboard"),
    # Limits of the account
    Row((400,), "exceeds maximum allowed per", FINAL, API, RESOURCES_ADVICE),
    Row((400, 402, 403), r"\b(limit|quota)s? (has been |is )?(exceeded|reached)", QUOTA, API),
    Row((403,), "is suspended", FINAL, "organization.service.ts", "see Daytona's dashboard"),
    Row((403, 404), r"Region (\S+ is not available|not found)", FINAL, API, "set target to another"),
    # Settings of the block
    Row((400,), NETWORK, FINAL, "network-validation.util.ts", "change network_allow_list or domain_allow_list"),
    Row((400,), "Invalid mount path", FINAL, "volume-mount-path-validation.util.ts", "set volume_mount_path"),
    Row((400,), r"\b\w+ must (not )?be ", FINAL, "main.ts: the framework's check of each field"),
    # The key. A temporary refusal of a valid key looks the same as the refusal of a wrong key.
    Row((401,), "", KEY, "global-auth.guard.ts, #5136", KEY_ADVICE),
    Row((403,), "Forbidden resource", KEY, "the framework's text for every guard", "use a key with that right"),
)
UNKNOWN = Row((), "", PASSING, "nothing is known of it")
REFUSED_REQUEST = Row((), "", FINAL, "the sandbox's daemon, or the SDK, of what it was asked for")


def get_status(error: BaseException) -> int | None:
    """Return the HTTP status of a refused call; None if no answer arrived."""
    return getattr(error, "status_code", None)


def get_message(error: BaseException) -> str:
    """Return the provider's message, without the SDK's prefix."""
    # The SDK ignores an answer whose message is a list, so read the answer's body first.
    body = getattr(error.__cause__, "body", None) or ""
    words = extract_message(str(body)) or extract_message(str(error))
    message = re.sub(r"^(Fail(ed|ure) [a-z ]+:( |$))+", "", " ".join(words.split()))[:1000]
    if message:
        return message
    if isinstance(error.__cause__, TimeoutError):
        return "no answer came in time"
    status = get_status(error)
    if status is not None:
        return f"status {status}"
    return type(error.__cause__ or error).__name__


def find_row(error: BaseException) -> Row:
    """Return the table's row for an error.

    An error that the table does not have is PASSING, or FINAL if the sandbox's daemon or the SDK refused the request.
    """
    status = get_status(error)
    message = get_message(error)
    if status is None:
        # No answer arrived. These types mean that the call was lost; others, that the SDK itself refused the request.
        is_lost = isinstance(error, (daytona.DaytonaConnectionError, daytona.DaytonaTimeoutError))
        if is_lost or type(error) is daytona.DaytonaError:
            return UNKNOWN
        return REFUSED_REQUEST
    if status >= 500 or status == 408:
        return UNKNOWN
    for row in TABLE:
        if status in row.statuses and re.search(row.pattern, message, re.IGNORECASE):
            return row
    # The error of an upload has the whole answer as its text.
    is_daemons = getattr(error, "source", None) == "DAYTONA_DAEMON" or '"source":"DAYTONA_DAEMON"' in str(error)
    return REFUSED_REQUEST if is_daemons else UNKNOWN


def says_gone(error: BaseException) -> bool:
    """Return True if the error says that the sandbox is gone or in deletion."""
    return find_row(error).meaning is GONE


def is_transient(error: BaseException) -> bool:
    """Return True if repeating the call may soon succeed."""
    return find_row(error).meaning in (PASSING, THROTTLED, KEY)


def is_turned_away(error: BaseException) -> bool:
    """Return True if the error is transient and the call was refused before it had any effect."""
    return is_transient(error) and get_status(error) in range(400, 500)


def get_retry_after(error: BaseException) -> float | None:
    """Return the seconds that a refusal asks to wait. The header's name may end with the name of the limit."""
    headers: dict[str, Any] = getattr(error, "headers", None) or {}
    for name, value in headers.items():
        if name.lower().startswith("retry-after") and re.fullmatch(r"\d+(\.\d+)?", str(value)):
            return float(value)
    return None


def get_delay(error: Exception, attempt: int) -> float:
    """Return the seconds before the next attempt (counted from 0): an increasing delay, or more if the error asks."""
    asked = min(get_retry_after(error) or 0.0, LONGEST_WAIT_SECONDS)
    return max(asked, compute_backoff(attempt, 0.1, 4.0)) * random.uniform(1.0, 1.5)


async def retry_call(
    call: Callable[[], Awaitable[T]],
    *,
    seconds: float | None = None,
    remote: daytona.AsyncSandbox | None = None,
    is_passing: Callable[[Exception], bool] = is_transient,
) -> T:
    """Make a call that may be repeated, and retry it when it is lost or refused. Raise the last DaytonaError.

    Args:
        call: The call.
        seconds: Retry for this time. By default, try `TRIES` times.
        remote: The sandbox that the call is for. Retrying stops when it is gone.
        is_passing: Decides which DaytonaErrors are retried. A refused key is retried only for `KEY_SECONDS`.
    """
    began = time.monotonic()
    key_refused_at: float | None = None
    attempt = 0
    while True:
        try:
            return await call()
        except daytona.DaytonaError as error:
            meaning = find_row(error).meaning
            delay = get_delay(error, attempt)
            now = time.monotonic()
            attempt += 1
            if meaning is KEY:
                if key_refused_at is None:
                    key_refused_at = now
                is_over = now + delay > key_refused_at + KEY_SECONDS
            elif seconds is None:
                is_over = attempt >= TRIES
            else:
                is_over = now + delay > began + seconds
            if is_over or not is_passing(error):
                raise
        await asyncio.sleep(delay)
        if remote is not None and meaning is PASSING:
            await check_existence(remote)


def get_state(item: Any) -> str:
    """Return the state of a sandbox, volume or snapshot, also a state that the SDK does not know."""
    return str(getattr(item.state, "value", item.state))


async def check_existence(remote: daytona.AsyncSandbox) -> None:
    """Raise a DaytonaError with the meaning GONE if the sandbox's record says that it is not running.

    Daytona's proxy gives the same answer for removed and starting sandboxes.
    """
    try:
        await remote.refresh_data(CALL_SECONDS)
    except daytona.DaytonaError as error:
        if says_gone(error):
            raise
        return
    state = get_state(remote)
    if state in ENDED_STATES:
        raise daytona.DaytonaError(f"Sandbox {remote.id} is not started: it is {state}", status_code=409)


@contextmanager
def convert_errors(failure: str) -> Iterator[None]:
    """Convert errors of the SDK. `failure` says what could not be done."""
    try:
        yield
    except daytona.DaytonaError as error:
        raise map_error(error, failure) from error


def map_error(error: BaseException, failure: str) -> RlmBatchError:
    """Convert an error of the SDK. `failure` says what could not be done."""
    row = find_row(error)
    message = get_message(error)
    if row.meaning is GONE:
        return SandboxStartError(f"{failure}: the sandbox disappeared meanwhile ({message})")
    if row.meaning is THROTTLED:
        return QuotaExceeded(f"{failure}: Daytona refused temporarily ({message})", retry_after=get_retry_after(error))
    if row.meaning is QUOTA:
        return QuotaExceeded(
            f"{failure}: the account's quota is used up ({message}): lower `max_workers`, "
            "wait for other sandboxes, or raise the quota in Daytona's dashboard"
        )
    if row.meaning is KEY:
        return ConfigurationError(f"{failure}: Daytona refused the API key ({message}): {row.advice}")
    if row.meaning is FINAL:
        advice = row.advice or "change the block's settings"
        return ConfigurationError(f"{failure}: Daytona refused it ({message}); {advice}")
    return SandboxStartError(f"{failure}: {message}")
