"""The report of an error that ended the code: its kind, its line, its traceback, and the limit that caused it."""

from __future__ import annotations

import errno
import os
import resource

from ...wire.names import DRIVER_FILE_PREFIX
from .forking import ThreadsLeftError
from .submit import SubmitError
from .volume import VolumeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TRACEBACK_CHARACTERS = 20_000
MAX_EXIT_CODE = (1 << 31) - 1
KINDS = {
    MemoryError: "memory", SubmitError: "submit", VolumeError: "volume", SystemExit: "exit",
    ThreadsLeftError: "threads",
}  # fmt: skip
COMPILATION_ERRORS = (SyntaxError, ValueError, RecursionError, OverflowError)
NO_THREAD = "can't start new thread"  # Python's message, whatever the cause
STARTERS = ("_execute_child", "_fork_exec", "_launch")  # standard library functions that start processes
SMALL_BYTES = 64 * 1024
# Read through BaseException: a class of the code may have a property with that name.
get_traceback: Any = BaseException.__dict__["__traceback__"].__get__


def describe_error(error: BaseException, file_name: str, *, is_compiled: bool) -> dict[str, Any]:
    """Return the report's JSON fields. `file_name` is the code's name in tracebacks. Code of the error may raise."""
    line = _find_line(error, file_name, is_compiled)  # `format_traceback` shortens the traceback, so this comes first.
    try:
        message = str(error)
    except BaseException:
        message = "(its message could not be read)"
    try:
        text = format_traceback(error)
    except BaseException:  # the code may have changed a module that `traceback` uses
        text = f"{type(error).__qualname__}: {message}\n"[:MAX_TRACEBACK_CHARACTERS]
    code: Any = error.code if isinstance(error, SystemExit) else None
    return {
        "kind": _find_kind(error, is_compiled),
        "type": type(error).__qualname__,
        "message": message[:MAX_TRACEBACK_CHARACTERS],
        "traceback": text,
        "exit_code": int(code) if isinstance(code, int) and abs(code) <= MAX_EXIT_CODE else None,
        "line": line,
        "limit": _find_limit(error),
    }


def _find_kind(error: BaseException, is_compiled: bool) -> str:
    for kind, name in KINDS.items():
        if isinstance(error, kind):
            return name
    is_syntax_error = not is_compiled and isinstance(error, COMPILATION_ERRORS)
    return "syntax" if is_syntax_error else "code"


def _find_line(error: BaseException, file_name: str, is_compiled: bool) -> int | None:
    """Return the innermost line of the code that the error passed through."""
    if isinstance(error, SyntaxError) and not is_compiled:
        return error.lineno
    line = None
    trace = get_traceback(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file_name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def clear_frames(error: BaseException) -> None:
    """Free the local variables of an error's frames, so that there is memory to describe it."""
    trace = get_traceback(error)
    while trace is not None:
        try:
            trace.tb_frame.clear()
        except RuntimeError:
            pass  # a running frame: the driver's own
        trace = trace.tb_next


def format_traceback(error: BaseException) -> str:
    """Return the text of the error's traceback, cut to the limit, without the driver's frames at its begin and end."""
    import traceback

    first = get_traceback(error)
    while first is not None and _is_of_driver(first):
        first = first.tb_next
    trace, last_of_code = first, None
    while trace is not None and not _is_of_driver(trace):
        last_of_code, trace = trace, trace.tb_next
    if last_of_code is not None:
        last_of_code.tb_next = None  # leaves out frames such as SUBMIT
    text = "".join(traceback.format_exception(type(error), error, first))
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return text


def _is_of_driver(trace: Any) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(DRIVER_FILE_PREFIX)


def _find_limit(error: BaseException) -> str:
    """Return the sandbox's limit that caused an error or its direct cause, such as "memory"; empty if uncertain."""
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
    lacks_bytes = disk.f_bavail * disk.f_frsize < SMALL_BYTES
    lacks_inodes = disk.f_files > 0 and disk.f_favail == 0
    return lacks_bytes or lacks_inodes
