"""Processes of a sandbox: signals to them, and the end of those that nobody waits for."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Container
else:
    try:
        import _signal as signal  # `signal` itself imports `enum`
    except ImportError:  # another Python than CPython
        import signal

KILL_GRACE_SECONDS = 1.0  # that an interrupted execution has to unwind before it is killed
END_TIMEOUT_SECONDS = 5.0  # in which all that a driver leaves is ended


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
    """The ids of this process's children, adopted ones among them."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        pass
    children: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return children
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == me:
                        children.append(int(name))
            except OSError:
                continue  # it ended meanwhile
    return children


def kill_strangers(*known: Container[int]) -> None:
    """Kills the children of this process that none of these knows: what an ended execution left running.

    A child adopts its own orphans while it lives, so a child of ours that we did not fork is one whose execution has
    ended. Bounded, because code may fork as fast as we kill: each death brings us back here.
    """
    for _ in range(50):
        strangers = [pid for pid in list_children() if not any(pid in pids for pids in known)]
        if not strangers:
            return
        for pid in strangers:
            send_signal(pid, signal.SIGKILL)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def kill_all_children() -> None:
    """Kills every child of this process and waits for their ends, for a while at most."""
    until = time.monotonic() + END_TIMEOUT_SECONDS
    while time.monotonic() < until:
        kill_strangers()
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.005)


def count_memory_kills() -> int:
    """How often this kernel has killed for want of memory; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return int(file.read().partition("oom_kill ")[2].partition("\n")[0])
    except (OSError, ValueError):
        return 0
