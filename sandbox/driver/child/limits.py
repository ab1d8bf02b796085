"""The sandbox's limit that caused an exception, so that the host can name the limit's option."""

from __future__ import annotations

import errno
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NO_THREAD = "can't start new thread"  # Python's message, whatever the cause
STARTERS = ("_execute_child", "_fork_exec", "_launch")  # standard library functions that start processes
SMALL_BYTES = 64 * 1024


def find_limit(error: BaseException) -> str:
    """Return the limit that caused an exception or its direct cause, such as "memory"; empty if uncertain."""
    try:
        return _find_own_limit(error) or _find_own_limit(error.__cause__)
    except Exception:  # the code may have made the exception
        return ""


def _find_own_limit(error: Any) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and error.args == (NO_THREAD,):
        return "processes"
    if not isinstance(error, OSError):
        return ""
    if error.errno == errno.EAGAIN:
        return "processes" if _has_started_process(error) else ""
    if error.errno == errno.ENOMEM:
        has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        return "memory" if has_limit and not _has_started_process(error) else ""
    if error.errno == errno.ENOSPC:
        if _is_full("/dev/shm"):
            return "shm"
        return "disk" if _is_full(".") or _is_full(os.environ.get("TMPDIR", "/tmp")) else ""
    return {errno.EMFILE: "open_files", errno.EFBIG: "file_size"}.get(error.errno or 0, "")


def _has_started_process(error: BaseException) -> bool:
    """Return whether a call that starts a process raised the error. Other calls fail with the same error number."""
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_name in STARTERS or bool({"fork", "forkpty"}.intersection(code.co_names))


def _is_full(path: str) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < SMALL_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
