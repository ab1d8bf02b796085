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
    """Return a child's exit code and signal, of which one is None, or None while the child runs. Do not reap it.

    Raises ChildProcessError if `pid` is not a child.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return info.si_status, None
    return None, info.si_status


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
    """Return the ids of this process's children, including adopted ones."""
    # The kernel may skip children if one leaves its list during the read. Only reaping, by this process, removes one.
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", "rb", 0) as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid, (parent, _) in read_processes().items() if parent == me]


def list_descendants(*pids: int) -> dict[int, int]:
    """Return the start times of all descendants of the processes, in clock ticks by process id."""
    processes = read_processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _start_time) in processes.items():
        children.setdefault(parent, []).append(pid)
    family = list(pids)
    for pid in family:  # The loop also visits the children that it adds.
        family += children.pop(pid, ())
    descendants = family[len(pids) :]
    return {pid: processes[pid][1] for pid in descendants}


def kill_exactly(pid: int, start_time: int) -> None:
    """Kill a process only if it still has this start time: the id may belong to another process by now."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return  # no such process, or a Python or kernel without handles
    try:
        if read_process(pid)[1] == start_time:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (AttributeError, OSError):
        pass
    finally:
        os.close(handle)


def read_name(pid: int) -> str:
    """Return a process's name, which its code may have set, or "?" if the process has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read().decode("utf-8", "replace").strip()
    except OSError:
        return "?"
    return name if name.isprintable() else ascii(name)


def count_memory_kills() -> int:
    """Return how often this kernel has killed a process for lack of memory, or 0 if the kernel does not count."""
    try:
        with open("/proc/vmstat", "rb", 0) as file:
            return int(file.read().partition(b"oom_kill ")[2].partition(b"\n")[0])
    except (OSError, ValueError):
        return 0


def describe_end(exit_code: int | None, signal_number: int | None) -> str:
    """Return a clause that says how a process ended, to follow its name in a message."""
    if not signal_number:
        return f"exited with status {exit_code}"
    for name in dir(signal):
        if name.startswith("SIG") and getattr(signal, name) == signal_number:
            return f"was killed by {name}"
    return f"was killed by signal {signal_number}"
