"""How many sandboxes a flow run may open now: some at once, then more each second, and fewer after a refusal.

A provider says what it can take late, by refusing: 429, or that the workspace is full. So a run finds it out, as TCP
finds out the capacity of a network. `AdmissionLimit` is the arithmetic, without a clock of its own; `Admission` is what
lanes wait at.
"""

import asyncio
import logging
import math
from collections import deque
from typing import Any

from ...sandbox.errors import RlmBatchError

Log = logging.Logger | logging.LoggerAdapter[Any]

INITIAL_PERMITS = 20  # sandboxes that a run opens at once: four seconds of the lowest published limit, 300 a minute
FIRST_OPENINGS_PER_SECOND = 20.0  # after those, and one more for each that was opened, up to
MAX_OPENINGS_PER_SECOND = 60.0  # the largest of Daytona's published limits is ten a second
REFUSAL_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before one more is tried, where a refusal names no time
REFUSAL_PATIENCE_SECONDS = 60.0  # without any sandbox, after which a refusal is an error and not only waited out
LOG_INTERVAL_SECONDS = 300.0  # between two lines of the log that say that the provider refuses


class Permit:
    """The right to have one sandbox open, or to be opening it."""

    def __init__(self, period: int) -> None:
        self.period = period  # between two refusals, in which it was issued
        self.is_open = False


class AdmissionLimit:
    """The number of sandboxes that a run may have. It grows while nothing is refused, and shrinks to what is open.

    After a refusal nothing is tried for as long as the provider asked; without such a time, what replaces a sandbox
    that was closed is opened at once. Then one sandbox more is tried, and others when that one is there.
    `now` is in seconds, by any clock that does not go back.
    """

    def __init__(self, now: float, initial_permits: float = INITIAL_PERMITS) -> None:
        self.max_permits = initial_permits
        self.permit_count = 0  # that are issued
        self.open_count = 0  # of them with an open sandbox
        self._period = 0
        self._refusal_count = 0  # since a sandbox was opened that was asked for after a refusal
        self._opened_count = 0  # in this period
        self.has_opened_sandbox = False  # ever
        self._grows_at = now + 1 / FIRST_OPENINGS_PER_SECOND
        self._resumes_at: float | None = None
        self._last_open_at = now

    def compute_wait(self, now: float) -> float:
        """Seconds until a permit may be free, 0 where one is; infinite where only a return or an opening frees one."""
        if self._resumes_at is not None:
            if now < self._resumes_at:
                return self._resumes_at - now
            self._resumes_at = None
            self.max_permits = self.permit_count  # those that were closed meanwhile do not all come back in one instant
        if self.permit_count < self.max_permits:
            return 0.0
        if self._refusal_count and self.permit_count > self.open_count:
            return math.inf  # it is being tried
        return max(0.0, self._grows_at - now)

    def issue_permit(self, now: float) -> Permit:
        """A permit, where `compute_wait` is 0."""
        if self.permit_count >= self.max_permits:
            self.max_permits = self.permit_count + 1
            self._grows_at = now + 1 / min(FIRST_OPENINGS_PER_SECOND + self._opened_count, MAX_OPENINGS_PER_SECOND)
        self.permit_count += 1
        return Permit(self._period)

    def record_opening(self, permit: Permit) -> None:
        """Records that the permit's sandbox is open."""
        permit.is_open = True
        self.has_opened_sandbox = True
        self.open_count += 1
        self.max_permits = max(self.max_permits, self.open_count)
        if permit.period == self._period:
            self._opened_count += 1
            self._refusal_count = 0

    def record_failure(self) -> None:
        """Slows down after a sandbox that failed to start: if that was for load, more at a time would not help."""
        self._opened_count = 0

    def record_refusal(self, permit: Permit, now: float, retry_after: float | None) -> None:
        """Returns a permit whose sandbox was refused for now; `retry_after` is what the provider asked for."""
        self.return_permit(permit, now)
        if retry_after:
            self._resumes_at = max(self._resumes_at or 0.0, now + retry_after)
        if permit.period != self._period:
            return  # one of several that were asked for together
        pause = REFUSAL_PAUSES_SECONDS[min(self._refusal_count, len(REFUSAL_PAUSES_SECONDS) - 1)]
        self._period += 1
        self._refusal_count += 1
        self._opened_count = 0
        self.max_permits = self.open_count
        self._grows_at = now + max(pause, retry_after or 0.0)

    def return_permit(self, permit: Permit, now: float) -> None:
        """Takes a permit back, whose sandbox was removed."""
        self.permit_count -= 1
        if permit.is_open:
            self.open_count -= 1
            self._last_open_at = now

    def had_sandbox_within(self, seconds: float, now: float) -> bool:
        """Whether this run has a sandbox, had one so short a while ago, or began so short a while ago."""
        return self.open_count > 0 or now - self._last_open_at < seconds


class Admission:
    """The permits of one flow run, for which its lanes wait. `is_gradual` is false for a provider without other users.

    It is made and used on one event loop.
    """

    def __init__(self, log: Log | None = None, *, is_gradual: bool = True) -> None:
        self._log = log
        self.limit = AdmissionLimit(read_clock(), INITIAL_PERMITS if is_gradual else math.inf)
        self._waiters: deque[asyncio.Future[Permit | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._log_again_at = -math.inf
        self._error: RlmBatchError | None = None

    async def acquire(self, *, is_urgent: bool = False) -> Permit | None:
        """Waits for a permit; None once `dismiss_waiters` was called. An urgent call is before the others that wait.

        None at once where `end` was called.
        """
        if self._error is not None:
            return None
        waiter: asyncio.Future[Permit | None] = asyncio.get_running_loop().create_future()
        (self._waiters.appendleft if is_urgent else self._waiters.append)(waiter)
        self._issue_permits()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (permit := waiter.result()) is not None:
                self.release(permit)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not self._waiters and self._timer is not None:
                self._timer.cancel()

    def record_opening(self, permit: Permit) -> None:
        """Records that the permit's sandbox is open."""
        self.limit.record_opening(permit)
        self._issue_permits()

    def record_failure(self, permit: Permit) -> None:
        """Returns a permit whose sandbox failed to start."""
        self.limit.record_failure()
        self.release(permit)

    def record_refusal(self, permit: Permit, retry_after: float | None, reason: str) -> None:
        """Returns a permit whose sandbox was refused for now; `reason` is for the log."""
        now, limit = read_clock(), self.limit
        limit.record_refusal(permit, now, retry_after)
        if self._log is not None and now >= self._log_again_at:
            self._log_again_at = now + LOG_INTERVAL_SECONDS
            self._log.warning(
                "the provider opens no more sandboxes for now, while %d are open: the run goes on with those that "
                "it gets, and asks for more from time to time (%s)",
                limit.open_count,
                reason,
            )
        self._issue_permits()

    def release(self, permit: Permit) -> None:
        """Takes a permit back, whose sandbox was removed."""
        self.limit.return_permit(permit, read_clock())
        self._issue_permits()

    def dismiss_waiters(self) -> None:
        """Gives None to all that wait, as there is no more work."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def had_sandbox_within(self, seconds: float) -> bool:
        """Whether this run has a sandbox, had one so short a while ago, or began so short a while ago."""
        return self.limit.had_sandbox_within(seconds, read_clock())

    @property
    def has_recent_sandbox(self) -> bool:
        """Whether a refusal for now is to be waited out: this run has a sandbox, or had one a short while ago."""
        return self.had_sandbox_within(REFUSAL_PATIENCE_SECONDS)

    @property
    def has_opened_sandbox(self) -> bool:
        """Whether any sandbox of this run has been ready."""
        return self.limit.has_opened_sandbox

    @property
    def error(self) -> RlmBatchError | None:
        """What `end` was given, None before."""
        return self._error

    def end(self, error: RlmBatchError) -> None:
        """Issues no permit any more, for that reason, of which the first is kept."""
        self._error = self._error or error
        self.dismiss_waiters()

    def _issue_permits(self) -> None:
        """Hands out the permits that are free, and sets a timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            if self._waiters[0].done():  # cancelled
                self._waiters.popleft()
                continue
            now = read_clock()
            wait = self.limit.compute_wait(now)
            if wait > 0:
                if wait < math.inf:
                    self._timer = asyncio.get_running_loop().call_later(wait, self._issue_permits)
                return
            self._waiters.popleft().set_result(self.limit.issue_permit(now))


def read_clock() -> float:
    """The event loop's time, in seconds."""
    return asyncio.get_running_loop().time()
