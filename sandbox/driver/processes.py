"""Processes of a sandbox: signals to them, and what the kernel says of them."""

from __future__ import annotations

import os
import select
import time

from ..wire.process_table import read_process, read_processes

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


def read_end(pid: int) -> tuple[int | None, int | None] | None:
    """The exit status of a child that has ended, or its signal; None while it has not. It stays unreaped.

    Raises ChildProcessError for what is no child of this process.
    """
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return (end.si_status, None) if end.si_code == os.CLD_EXITED else (None, end.si_status)


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; it stays unreaped. Raises ChildProcessError for what is no child."""
    return read_end(pid) is not None


def wait_for_end(pid: int, seconds: float) -> None:
    """Waits until a child of this process has ended, which stays unreaped, for that time at most."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        time.sleep(seconds)
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(handle)


def list_children() -> list[int]:
    """The ids of this process's children, adopted ones among them.

    Complete, because nobody else reaps them: the kernel's list may lack some where others leave it while it is read.
    """
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid, (parent, _) in read_processes().items() if parent == me]


def list_descendants(*pids: int) -> dict[int, int]:
    """What is below some processes, the oldest generation first: ids, and the clock ticks when each was started."""
    processes = read_processes()
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        below.setdefault(parent, []).append(pid)
    found = list(pids)
    for pid in found:
        found += below.pop(pid, ())
    return {pid: processes[pid][1] for pid in found[len(pids) :]}


def kill_exactly(pid: int, started: int) -> None:
    """Kills the process that had this id when it was listed, and no other that has got the id since."""
    try:
        process = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    try:
        if read_process(pid)[1] == started:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except (AttributeError, OSError):
        pass
    finally:
        os.close(process)


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


def describe_end(code: int | None, number: int | None) -> str:
    """How a process has ended, by its exit status or its signal: what stands after its name."""
    return f"was killed by signal {number}" if number else f"exited with status {code}"
