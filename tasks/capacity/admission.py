"""The number of sandboxes that a flow run may open now. It grows each second, and shrinks after a refusal.

A provider shows its capacity only by refusals: with 429, or because the workspace is full. So a run finds the capacity
as TCP finds the capacity of a network: it increases the number until the provider refuses.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...blocks.retry import compute_backoff
from ...sandbox.errors import RlmBatchError

Log = logging.Logger | logging.LoggerAdapter[Any]

INITIAL_PERMITS = 20  # sandboxes at once; the lowest published limit, 300 a minute, allows them in four seconds
FIRST_OPENINGS_PER_SECOND = 20.0  # the rate after `INITIAL_PERMITS`; each opened sandbox adds one
MAX_OPENINGS_PER_SECOND = 60.0  # the largest of Daytona's published limits is ten a second
LONGEST_PAUSE_SECONDS = 30.0  # the longest pause after refusals that name no time
LOG_INTERVAL_SECONDS = 300.0  # seconds between two log lines on refusals


@dataclass(slots=True, eq=False)
class Permit:
    """The right to open one sandbox and to keep it open."""

    period: int  # the number of refusals before the permit was issued
    is_open: bool = False


class Admission:
    """The permits of one flow run. Their number grows until a refusal, which reduces it to the open sandboxes.

    If the refusal names a time to wait, no permit is issued for this time. Otherwise there is a pause during which a
    closed sandbox may be replaced at once. Then the run tries one more sandbox, and further ones when it is open.
    Without `is_gradual`, for providers with no other users, the number of permits is not limited.
    """

    def __init__(
        self, log: Log | None = None, *, is_gradual: bool = True, clock: Callable[[], float] | None = None
    ) -> None:
        self._log = log
        self._clock = clock or asyncio.get_running_loop().time
        # The call of each kind that has waited longest holds the kind's lock.
        self._turn, self._urgent_turn = asyncio.Lock(), asyncio.Lock()
        self._urgent_count = 0  # urgent calls that wait
        self._dismissal_count = 0  # calls of `dismiss_waiters`
        self._changed = asyncio.Event()  # set when a permit may be free
        self._log_again_at = -math.inf
        self.error: RlmBatchError | None = None  # the reason for `end`
        self.max_permits = INITIAL_PERMITS if is_gradual else math.inf
        self.permit_count = 0  # issued permits
        self.open_count = 0  # issued permits with an open sandbox
        self.has_opened_sandbox = False  # True if this run has ever opened a sandbox
        self._period = 0  # refusals so far; simultaneous ones count as one
        self._refusal_count = 0  # refusals since a sandbox last opened after a refusal
        self._opened_count = 0  # sandboxes opened since the last refusal
        self._grows_at = self._clock() + 1 / FIRST_OPENINGS_PER_SECOND  # when `max_permits` may grow by one
        self._resumes_at: float | None = None  # the end of the time that the provider asked to wait
        self._last_closed_at = self._clock()

    async def acquire(self, *, is_urgent: bool = False) -> Permit | None:
        """Wait for a permit. Urgent calls get theirs before the others.

        Return None after `dismiss_waiters` or `end`.
        """
        dismissal_count = self._dismissal_count
        turn = self._urgent_turn if is_urgent else self._turn
        self._urgent_count += 1 if is_urgent else 0
        try:
            async with turn:
                while self.error is None and self._dismissal_count == dismissal_count:
                    seconds = self.compute_wait()
                    must_wait_for_urgent_calls = not is_urgent and self._urgent_count > 0
                    if seconds <= 0 and not must_wait_for_urgent_calls:
                        return self.issue_permit()
                    timeout = seconds if 0 < seconds < math.inf else None
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(timeout):
                            await self._changed.wait()
        finally:
            self._urgent_count -= 1 if is_urgent else 0
            self._changed.set()
        return None

    def acquire_now(self) -> Permit | None:
        """Return a permit if one is free and no other call waits for it, else None."""
        has_waiters = self._urgent_count > 0 or self._turn.locked()
        if self.error is not None or has_waiters:
            return None
        return self.issue_permit() if self.compute_wait() <= 0 else None

    def compute_wait(self) -> float:
        """Return the seconds until a permit may be free. They are infinite if a sandbox must open or close first."""
        now = self._clock()
        if self._resumes_at is not None:
            if now < self._resumes_at:
                return self._resumes_at - now
            self._resumes_at = None
            self.max_permits = self.permit_count  # Do not reissue at once all permits released meanwhile.
        if self.permit_count < self.max_permits:
            return 0.0
        is_trying_a_sandbox = self._refusal_count > 0 and self.permit_count > self.open_count
        if is_trying_a_sandbox:
            return math.inf
        return max(0.0, self._grows_at - now)

    def issue_permit(self) -> Permit:
        """Return a permit. Call this only if `compute_wait` returns 0."""
        if self.permit_count >= self.max_permits:
            self.max_permits = self.permit_count + 1
            rate = min(FIRST_OPENINGS_PER_SECOND + self._opened_count, MAX_OPENINGS_PER_SECOND)
            self._grows_at = self._clock() + 1 / rate
        self.permit_count += 1
        return Permit(self._period)

    def record_opening(self, permit: Permit) -> None:
        """Record that the permit's sandbox is open."""
        permit.is_open = True
        self.has_opened_sandbox = True
        self.open_count += 1
        self.max_permits = max(self.max_permits, self.open_count)
        if permit.period == self._period:  # It was issued after the last refusal.
            self._opened_count += 1
            self._refusal_count = 0
        self._changed.set()

    def record_refusal(self, permit: Permit, retry_after: float | None, reason: str) -> None:
        """Take back a permit after a temporary refusal. `retry_after` are the seconds that the provider asked to wait.

        The pause grows with each refusal in a row. Refusals of simultaneous requests count as one.
        """
        now = self._clock()
        self.release(permit)
        if retry_after:
            self._resumes_at = max(self._resumes_at or 0.0, now + retry_after)
        is_first_of_period = permit.period == self._period
        if is_first_of_period:
            pause = compute_backoff(self._refusal_count, longest=LONGEST_PAUSE_SECONDS)
            self._period += 1
            self._refusal_count += 1
            self._opened_count = 0
            self.max_permits = self.open_count
            self._grows_at = now + max(pause, retry_after or 0.0)
        if self._log is not None and now >= self._log_again_at:
            self._log_again_at = now + LOG_INTERVAL_SECONDS
            text = "the provider opens no more sandboxes for now, with %d open: the run continues with these (%s)"
            self._log.warning(text, self.open_count, reason)

    def release(self, permit: Permit) -> None:
        """Take back a permit. Call this after the permit's sandbox is removed, or if it did not open."""
        self.permit_count -= 1
        if permit.is_open:
            self.open_count -= 1
            self._last_closed_at = self._clock()
        self._changed.set()

    def dismiss_waiters(self) -> None:
        """Let all waiting calls return None, because there is no more work."""
        self._dismissal_count += 1
        self._changed.set()

    def end(self, error: RlmBatchError) -> None:
        """Issue no more permits, because of an error. If this is called again, the first error stays the reason."""
        self.error = self.error or error
        self.dismiss_waiters()

    def had_sandbox_within(self, seconds: float) -> bool:
        """Return whether a sandbox was open in the last `seconds`, or the run began in this time."""
        return self.open_count > 0 or self._clock() - self._last_closed_at < seconds
