"""Processes of a sandbox: signals to them, and their state according to the kernel."""

from __future__ import annotations

import os
import select
import time

from ..wire.process_table import read_process, read_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # `signal` itself imports `enum`

KILL_GRACE_SECONDS = 1.0  # time for an interrupted execution to unwind before the kill


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_session(pid: int) -> None:
    """Kill a child and its process group, which it leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    send_signal(pid, signal.SIGKILL)


def read_exit(pid: int) -> tuple[int | None, int | None] | None:
    """Return a child's exit status or its signal, and None for the other. Return None while the child runs.

    Raises ChildProcessError if `pid` is not a child.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return (info.si_status, None) if info.si_code == os.CLD_EXITED else (None, info.si_status)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it. Raises ChildProcessError if `pid` is not a child."""
    return read_exit(pid) is not None


def wait_for_end(pid: int, seconds: float) -> None:
    """Wait until a child has ended, for at most `seconds`. The child stays unreaped."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        # Some kernels, such as gVisor, have no such handle.
        end = time.monotonic() + seconds
        try:
            while not has_ended(pid) and time.monotonic() < end:
                time.sleep(min(seconds, 0.02))
        except ChildProcessError:
            pass  # The process has been reaped.
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(handle)


def list_children() -> list[int]:
    """Return the ids of this process's children, including adopted ones.

    The kernel may skip children if others leave the list during the read. The list is complete because only this
    process removes children from it, by reaping them.
    """
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid, (parent, _) in read_processes().items() if parent == me]


def list_descendants(*pids: int) -> dict[int, int]:
    """Return all descendants of the processes, oldest generation first: ids with start times in clock ticks."""
    processes = read_processes()
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        below.setdefault(parent, []).append(pid)
    family = list(pids)
    for pid in family:  # The loop also visits the children that it adds.
        family += below.pop(pid, ())
    return {pid: processes[pid][1] for pid in family[len(pids) :]}


def kill_exactly(pid: int, started: int) -> None:
    """Kill a process only if it still has this start time: the id may belong to another process by now."""
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
    """Return a process's name, which its code may have set, or "?" if the process has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return "".join(c if c.isprintable() else "?" for c in file.read().decode("utf-8", "replace").strip())
    except OSError:
        return "?"


def count_memory_kills() -> int:
    """Return how often this kernel has killed a process for lack of memory; 0 if it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return int(file.read().partition("oom_kill ")[2].partition("\n")[0])
    except (OSError, ValueError):
        return 0


def describe_end(code: int | None, number: int | None) -> str:
    """Return a clause that says how a process ended, to follow its name in a message."""
    if not number:
        return f"exited with status {code}"
    names = (name for name in dir(signal) if name.startswith("SIG") and getattr(signal, name) == number)
    return f"was killed by {next(names, f'signal {number}')}"
