"""How a flow run comes to many sandboxes: some at once, the others one after the other, and fewer after a refusal.

A provider has few words for what it bears, and says them late: 429, or that the workspace is full. So a run finds it
out, as TCP finds out what a network bears. `Room` is the arithmetic, with a clock that it is told; `Ramp` is what lanes
wait at.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any

Log = logging.Logger | logging.LoggerAdapter[Any]

AT_ONCE = 8  # sandboxes that a run opens without more ado
FIRST_PACE = 20.0  # more in a second, at first, and
LAST_PACE = 60.0  # once as many have been opened; the largest of Daytona's published limits is ten a second
LOOK_AGAIN = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds after a refusal that names no time, before one more is tried
PATIENCE = 60.0  # seconds without any sandbox through which a refusal is only waited out
SAY_AGAIN = 300.0  # seconds between two lines of the log that say that the provider refuses


class Place:
    """The right to have one sandbox open, or to be opening it."""

    def __init__(self, spell: int) -> None:
        self.spell = spell  # between two refusals
        self.is_open = False


class Room:
    """How many sandboxes a run may have. It grows with time while nothing is refused, and shrinks to what is open.

    After a refusal nothing is tried for as long as the provider asked; without such a time, what replaces a sandbox
    that was closed is opened at once. Then one sandbox more is tried, and others when that one is there.
    `now` is in seconds, by any clock that does not go back.
    """

    def __init__(self, now: float, at_once: float = AT_ONCE) -> None:
        self.most = at_once
        self.held = 0  # places
        self.open = 0  # of them with an open sandbox
        self._spell = 0
        self._refusals = 0  # since a sandbox was opened that was asked for after a refusal
        self._opened = 0  # in this spell
        self._grows_at = now + 1 / FIRST_PACE
        self._resumes_at: float | None = None
        self._had_one_at = now

    def wait(self, now: float) -> float:
        """Seconds until another place may be free, 0 where there is one; infinite where only an event can help."""
        if self._resumes_at is not None:
            if now < self._resumes_at:
                return self._resumes_at - now
            self._resumes_at = None
            self.most = self.held  # those that were closed meanwhile do not all come back in one instant
        if self.held < self.most:
            return 0.0
        if self._refusals and self.held > self.open:
            return math.inf  # it is being tried
        return max(0.0, self._grows_at - now)

    def take(self, now: float) -> Place:
        """A place, which `wait` has said is there."""
        if self.held >= self.most:
            self.most = self.held + 1
            self._grows_at = now + 1 / min(FIRST_PACE + self._opened, LAST_PACE)
        self.held += 1
        return Place(self._spell)

    def opened(self, place: Place) -> None:
        """Its sandbox is there."""
        place.is_open = True
        self.open += 1
        self.most = max(self.most, self.open)
        if place.spell == self._spell:
            self._opened += 1
            self._refusals = 0

    def failed(self) -> None:
        """A sandbox did not come up, for whatever reason: if it is for load, more at a time would not help."""
        self._opened = 0

    def refused(self, place: Place, now: float, asked: float | None) -> None:
        """Its sandbox was refused for now, and for `asked` seconds where the provider said so. Gives the place back."""
        self.leave(place, now)
        if asked:
            self._resumes_at = max(self._resumes_at or 0.0, now + asked)
        if place.spell != self._spell:
            return  # one of several that were asked for together
        pause = LOOK_AGAIN[min(self._refusals, len(LOOK_AGAIN) - 1)]
        self._spell += 1
        self._refusals += 1
        self._opened = 0
        self.most = self.open
        self._grows_at = now + max(pause, asked or 0.0)

    def leave(self, place: Place, now: float) -> None:
        """The place is given back, its sandbox removed."""
        self.held -= 1
        if place.is_open:
            self.open -= 1
            self._had_one_at = now

    def bears_some(self, now: float) -> bool:
        """Whether this run has a sandbox, or had one a short while ago: then room will come by itself."""
        return self.open > 0 or now - self._had_one_at < PATIENCE


class Ramp:
    """Where the lanes of one flow run wait for a place. `gradual` is false for a provider that has no others to serve.

    It is used on one event loop.
    """

    def __init__(self, log: Log | None = None, *, gradual: bool = True) -> None:
        self._log = log
        self._at_once = AT_ONCE if gradual else math.inf
        self._room: Room | None = None
        self._waiters: deque[asyncio.Future[Place | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._says_at = -math.inf

    async def take(self, *, first: bool = False) -> Place | None:
        """A place, as soon as there is one; None once `enough` was called. `first` is before others that wait."""
        waiter: asyncio.Future[Place | None] = asyncio.get_running_loop().create_future()
        (self._waiters.appendleft if first else self._waiters.append)(waiter)
        self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (place := waiter.result()) is not None:
                self.leave(place)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not self._waiters and self._timer is not None:
                self._timer.cancel()

    def opened(self, place: Place) -> None:
        """Its sandbox is there."""
        self.room.opened(place)
        self._serve()

    def failed(self, place: Place) -> None:
        """Its sandbox did not come up. Gives the place back."""
        self.room.failed()
        self.leave(place)

    def refused(self, place: Place, asked: float | None, said: str) -> None:
        """Its sandbox was refused for now, for `asked` seconds where the provider said so. Gives the place back."""
        now, room = _now(), self.room
        room.refused(place, now, asked)
        if self._log is not None and now >= self._says_at:
            self._says_at = now + SAY_AGAIN
            self._log.warning(
                "the provider opens no more sandboxes for now, while %d are open: the run goes on with those that "
                "it gets, and asks for more from time to time (%s)",
                room.open,
                said,
            )
        self._serve()

    def leave(self, place: Place) -> None:
        """The place is given back, its sandbox removed."""
        self.room.leave(place, _now())
        self._serve()

    def enough(self) -> None:
        """There is no more work: whoever waits gets None."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    @property
    def bears_some(self) -> bool:
        """Whether a refusal is to be waited out: this run has a sandbox, or had one a short while ago."""
        return self.room.bears_some(_now())

    @property
    def room(self) -> Room:
        """What is known of the provider, from the first question on."""
        if self._room is None:
            self._room = Room(_now(), self._at_once)
        return self._room

    def _serve(self) -> None:
        """Hands out the places that there are, and comes back when there may be more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            if self._waiters[0].done():  # cancelled
                self._waiters.popleft()
                continue
            now = _now()
            wait = self.room.wait(now)
            if wait > 0:
                if wait < math.inf:
                    self._timer = asyncio.get_running_loop().call_later(wait, self._serve)
                return
            self._waiters.popleft().set_result(self.room.take(now))


def _now() -> float:
    return asyncio.get_running_loop().time()
