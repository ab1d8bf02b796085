"""The end of what ended executions have left running: the children that this process adopted, and all below them."""

from __future__ import annotations

import os
import time

from .processes import (
    has_ended,
    kill_exactly,
    list_children,
    list_descendants,
    read_name,
    send_signal,
    signal,
    wait_for_end,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

END_TIMEOUT_SECONDS = 4.0  # in which all that a driver leaves is ended, or said by name
ORPHANS_TIMEOUT_SECONDS = 10.0  # in which all that an execution has left is
SCAN_SECONDS = 0.02  # between two looks at all processes
ROUND_SECONDS = 0.001  # between two rounds, for those that were killed to end
LATE_ROUND_SECONDS = 0.25  # between two rounds once that time is over
MAX_LISTS = 50  # of children, in one round: without a limit on processes new ones may end as fast as they are listed
MAX_ROUNDS = 10  # for what an execution of a context has started, until the context is ended with it
MAX_HELD = 4096  # of the dead, for there is a limit on processes that is the machine's
MAX_NAMES = 10  # in a sentence
NEVER = float("inf")


class OrphanKiller:
    """Kills the children of this process that it did not fork, whatever they fork meanwhile.

    Who has lost its parent is a child of ours (PR_SET_CHILD_SUBREAPER), and nobody else reaps it. So the dead are left
    unreaped for as long as one of them lives: each keeps one of the places that the code may have (RLIMIT_NPROC), and
    each round takes away those of all the oldest, killed or ended. Code that forks as fast as we kill, or forks and
    ends before it can be killed, is out of places after at most as many rounds as it had places. What is below the
    oldest is killed too: each generation would have to be given time to end before the next one is ours.
    """

    def __init__(self) -> None:
        self.next_at = NEVER  # monotonic seconds: when `kill` is to be called again
        self.is_late = False  # some live on although the time that they have had is over
        self._dead: set[int] = set()
        self._living: list[int] = []
        self._until = NEVER
        self._scan_at = NEVER  # not at once, for most have nothing below them

    def kill(self, *known: Container[int]) -> bool:
        """Kills the orphans, which are the children that none of these knows; whether none is left."""
        new: list[int] = [0]
        self._living = []
        for _ in range(MAX_LISTS):
            orphans = [pid for pid in list_children() if not any(pid in pids for pids in known)]
            new = [pid for pid in orphans if pid not in self._dead]
            # What one that has just ended had below it is ours since then, and not in this list.
            self._living = [pid for pid in new if not self._has_ended(pid)]
            if not new or len(self._dead) > MAX_HELD:
                self._reap()
            if self._living or not new:
                break
        now = time.monotonic()
        if not new:
            self.next_at = self._until = self._scan_at = NEVER
            self.is_late = False
            return True
        for pid in self._living:
            send_signal(pid, signal.SIGKILL)
        if now >= self._scan_at:
            for pid, started in list_descendants(*self._living).items():
                kill_exactly(pid, started)
            now = time.monotonic()
            self._scan_at = now + SCAN_SECONDS
        elif self._scan_at == NEVER:
            self._scan_at = now
        self._until = min(self._until, now + ORPHANS_TIMEOUT_SECONDS)
        self.is_late = now >= self._until
        self.next_at = now + (LATE_ROUND_SECONDS if self.is_late else ROUND_SECONDS)
        return False

    def wait(self, seconds: float) -> None:
        """Waits until one of those that were killed has ended, for that time at most."""
        if self._living:
            wait_for_end(self._living[0], seconds)
        else:
            time.sleep(seconds)

    def describe(self) -> str:
        """Those that live, by their ids and names."""
        names = [f"{pid} ({read_name(pid)})" for pid in self._living[:MAX_NAMES]]
        more = len(self._living) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def _has_ended(self, pid: int) -> bool:
        try:
            if not has_ended(pid):
                return False
            self._dead.add(pid)
        except ChildProcessError:
            pass
        return True

    def _reap(self) -> None:
        for pid in self._dead:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        self._dead.clear()


def kill_all_children() -> str:
    """Kills every child of this process, with all below it; those that could not be ended, by name."""
    killer, until = OrphanKiller(), time.monotonic() + END_TIMEOUT_SECONDS
    while time.monotonic() < until:
        if killer.kill():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ""  # as the kernel says, and not its list
        killer.wait(ROUND_SECONDS)
    return killer.describe()


def kill_descendants(pid: int, since: float) -> bool:
    """Kills what a process has started after that moment (CLOCK_BOOTTIME); whether all of it has been killed.

    The process reaps them itself, or does not: unlike orphans of ours, they may fork for ever.
    """
    first = since * os.sysconf("SC_CLK_TCK") - 1
    killed: dict[int, int] = {}
    for _ in range(MAX_ROUNDS):
        below = list_descendants(pid).items()
        new = {child: started for child, started in below if started >= first and killed.get(child) != started}
        if not new:
            return True  # who has been killed forks no more, whenever it ends
        for child, started in new.items():
            kill_exactly(child, started)
        killed.update(new)
    return False
