"""The sandbox's limit that caused an exception, so that the host can name the limit's option."""

from __future__ import annotations

import _thread
import errno
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NO_THREAD = "can't start new thread"  # Python's message, whatever the cause
STARTERS = ("_execute_child", "_fork_exec", "_launch")  # standard library functions that start processes
FILE_SIZE_STATUSES = (-25, 128 + 25)  # exit statuses of a program killed by SIGXFSZ, and of its shell
DEFAULT_STACK_BYTES = 8 * 1024 * 1024
SMALL_BYTES = 64 * 1024


def find_limit(error: BaseException) -> str:
    """Return the limit that caused an exception or its direct cause.

    Returns:
        "processes", "open_files", "file_size", "memory", "disk" or "shm"; empty if uncertain.
    """
    for candidate in (error, error.__cause__):
        if candidate is not None:
            limit = _find_own_limit(candidate)
            if limit:
                return limit
    return ""


def _find_own_limit(error: Any) -> str:
    try:
        if isinstance(error, MemoryError):
            return "memory"
        if isinstance(error, RuntimeError) and error.args == (NO_THREAD,):
            return "memory" if _has_no_room_for_stack() else "processes"
        if type(error).__name__ == "CalledProcessError" and getattr(error, "returncode", 0) in FILE_SIZE_STATUSES:
            return "file_size"
        if not isinstance(error, OSError):
            return ""
        if error.errno == errno.EMFILE:
            return "open_files"
        if error.errno == errno.EFBIG:
            return "file_size"
        if error.errno == errno.EAGAIN and _has_started_process(error):
            return "processes"
        if error.errno == errno.ENOMEM and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return "" if _has_started_process(error) else "memory"
        if error.errno == errno.ENOSPC:
            return (
                "shm"
                if _is_full("/dev/shm")
                else "disk"
                if _is_full(".") or _is_full(os.environ.get("TMPDIR", "/tmp"))
                else ""
            )
    except Exception:  # the code may have made the exception
        pass
    return ""


def _has_started_process(error: BaseException) -> bool:
    """Return whether a call that starts a process raised the error. Other calls fail with the same error number."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    if code.co_name in STARTERS:
        return True
    names = {"fork", "forkpty", "posix_spawn", "posix_spawnp", "fork_exec", "spawnv_passfds"}
    return bool(names.intersection(code.co_names)) and not {"recv", "read", "send", "flock"}.intersection(code.co_names)


def _has_no_room_for_stack() -> bool:
    """Return whether no address space is left for a thread's stack."""
    import mmap

    stack = _thread.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    try:
        mmap.mmap(-1, DEFAULT_STACK_BYTES if stack == resource.RLIM_INFINITY else stack).close()
    except OSError:
        return True
    return False


def _is_full(path: str) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < SMALL_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
