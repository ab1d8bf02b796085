"""Processes of a sandbox: signals to them, and what the kernel says of them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    try:
        import _signal as signal  # `signal` itself imports `enum`
    except ImportError:  # another Python than CPython
        import signal

KILL_GRACE_SECONDS = 1.0  # that an interrupted execution has to unwind before it is killed


def send_signal(pid: int, number: int) -> None:
    """Sends a signal; a process that has gone is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_session(pid: int) -> None:
    """Kills a child and its process group: a child is the leader of a session of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    send_signal(pid, signal.SIGKILL)


def list_children() -> list[int]:
    """The ids of this process's children, adopted ones among them.

    Complete, because nobody else reaps them: the kernel's list may lack some where others leave it while it is read.
    """
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid, (parent, _) in _read_processes().items() if parent == me]


def list_descendants(pid: int, since: float) -> list[int]:
    """The ids of a process's descendants that were started after that moment (CLOCK_BOOTTIME), the oldest first."""
    processes, found = _read_processes(), [pid]
    for above in found:
        found += [below for below, (parent, _) in processes.items() if parent == above]
    tick = 1 / os.sysconf("SC_CLK_TCK")
    return [below for below in found[1:] if processes[below][1] * tick > since - tick]


def _read_processes() -> dict[int, tuple[int, int]]:
    """Every process that has not ended: its parent, and the clock ticks from the machine's start to its own."""
    found: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    words = file.read().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if words[0] not in "ZX":
                found[int(name)] = int(words[1]), int(words[19])
    return found


def read_name(pid: int) -> str:
    """A process's name, which it may have chosen itself; a question mark where it has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return "".join(c if c.isprintable() else "?" for c in file.read().decode("utf-8", "replace").strip())
    except OSError:
        return "?"


def count_memory_kills() -> int:
    """How often this kernel has killed for want of memory; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return int(file.read().partition("oom_kill ")[2].partition("\n")[0])
    except (OSError, ValueError):
        return 0
