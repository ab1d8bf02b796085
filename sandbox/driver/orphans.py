"""Cleanup of processes that an execution left behind: the supervisor's adopted children and their descendants."""

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
    from collections.abc import Iterable

END_TIMEOUT_SECONDS = 4.0  # time to end all that a driver leaves; then the rest is reported by name
ORPHANS_TIMEOUT_SECONDS = 10.0  # time to end all that an execution leaves
SCAN_SECONDS = 0.02  # pause between two scans of all processes
ROUND_SECONDS = 0.001  # pause between two rounds, in which killed processes can end
LATE_ROUND_SECONDS = 0.25  # pause between two rounds after ORPHANS_TIMEOUT_SECONDS
MAX_LISTS = 50  # lists of children per round; without a process limit, every list may have new dead children
MAX_ROUNDS = 10  # rounds to kill the processes of an execution in a context; then kill the context too
MAX_HELD = 4096  # unreaped dead processes; they also count against the machine's process limit
MAX_NAMES = 10  # names in a message
NEVER = float("inf")


class OrphanKiller:
    """A killer of adopted children (orphans), which works even if they fork as fast as it kills them.

    A process that loses its parent becomes a child of this process (PR_SET_CHILD_SUBREAPER), and only this process
    reaps it. The killer reaps dead orphans only when no other one lives, because an unreaped process still counts
    against the code's RLIMIT_NPROC: code that keeps forking soon reaches that limit. The killer also kills the orphans'
    descendants, which otherwise would be adopted, and killed, only one generation after the other.
    """

    def __init__(self) -> None:
        self.next_at = NEVER  # monotonic seconds: when to call `kill` again
        self.is_late = False  # some orphans outlived ORPHANS_TIMEOUT_SECONDS
        self._dead: set[int] = set()
        self._living: list[int] = []
        self._until = NEVER
        self._scan_at = NEVER  # Most orphans end before the first scan, which would take longer than all the rest.

    def kill(self, *known: Iterable[int]) -> bool:
        """Kill the orphans, which are children not in any of `known`, and return whether none is left."""
        if not self._find_orphans(*known):
            self.next_at = self._until = self._scan_at = NEVER
            self.is_late = False
            return True
        now = self._kill_living()
        self._until = min(self._until, now + ORPHANS_TIMEOUT_SECONDS)
        self.is_late = now >= self._until
        self.next_at = now + (LATE_ROUND_SECONDS if self.is_late else ROUND_SECONDS)
        return False

    def _find_orphans(self, *known: Iterable[int]) -> bool:
        """Find the living orphans, and return whether there are orphans. Reap the dead ones if they are all or many."""
        known_pids: set[int] = set()
        known_pids.update(*known)
        new: list[int] = []
        self._living = []
        for _ in range(MAX_LISTS):
            new = [pid for pid in list_children() if pid not in known_pids and pid not in self._dead]
            self._living = [pid for pid in new if not self._has_ended(pid)]
            if not new or len(self._dead) > MAX_HELD:
                self._reap_dead()
            if self._living or not new:
                break
            # All new orphans have just ended, so their children were adopted after this list was read: list again.
        return bool(new)

    def _reap_dead(self) -> None:
        for pid in self._dead:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        self._dead.clear()

    def _kill_living(self) -> float:
        """Kill the living orphans, and their descendants if a scan is due. Return the time in monotonic seconds."""
        now = time.monotonic()
        for pid in self._living:
            send_signal(pid, signal.SIGKILL)
        if now >= self._scan_at:
            for pid, start_time in list_descendants(*self._living).items():
                kill_exactly(pid, start_time)
            now = time.monotonic()
            self._scan_at = now + SCAN_SECONDS
        elif self._scan_at == NEVER:
            self._scan_at = now + SCAN_SECONDS
        return now

    def wait(self, seconds: float) -> None:
        """Wait until a living orphan has ended, for at most `seconds`."""
        if self._living:
            wait_for_end(self._living[0], seconds)
        else:
            time.sleep(seconds)

    def describe(self) -> str:
        """Return the ids and names of the living orphans, or "" if there are none."""
        names = ", ".join(f"{pid} ({read_name(pid)})" for pid in self._living[:MAX_NAMES])
        unnamed = len(self._living) - MAX_NAMES
        return f"{names} and {unnamed} more" if unnamed > 0 else names

    def _has_ended(self, pid: int) -> bool:
        """Return whether an orphan has ended, and then record it as dead."""
        try:
            if not has_ended(pid):
                return False
            self._dead.add(pid)
        except ChildProcessError:
            pass  # The process was reaped.
        return True


def kill_all_children() -> str:
    """Kill all children and descendants of this process; return the names of those that did not end, or ""."""
    killer, until = OrphanKiller(), time.monotonic() + END_TIMEOUT_SECONDS
    while time.monotonic() < until:
        if killer.kill():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ""  # the kernel confirms that no child is left; `list_children` alone may miss some
        killer.wait(ROUND_SECONDS)
    return killer.describe()


def kill_descendants(pid: int, since: float) -> bool:
    """Kill a process's descendants started after `since` (CLOCK_BOOTTIME seconds); return whether all were killed.

    Give up after MAX_ROUNDS: the process reaps its own children, so dead ones do not count against the process limit,
    and the others may fork forever.
    """
    earliest_start = since * os.sysconf("SC_CLK_TCK") - 1
    killed: set[tuple[int, int]] = set()
    for _ in range(MAX_ROUNDS):
        descendants = list_descendants(pid).items()
        new = {(child, start_time) for child, start_time in descendants if start_time >= earliest_start} - killed
        if not new:
            return True  # killed processes fork no more, even if they have not ended yet
        for child, start_time in new:
            kill_exactly(child, start_time)
        killed |= new
    return False
