"""How an execution failed, as its host is told: the kind of error, its message, its line and its traceback."""

from __future__ import annotations

from ...wire.names import DRIVER_FILE_PREFIX
from .interrupts import Interrupted
from .submit import SubmitError
from .volume import VolumeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TRACEBACK_CHARACTERS = 20_000


def describe_error(error: BaseException, file_name: str, sources: dict[str, str], is_compiled: bool) -> dict[str, Any]:
    """What the host is told of the error that ended the code.

    `file_name` is that of the code, `sources` are the texts of this and earlier executions by theirs, and `is_compiled`
    is false where the code was no Python.
    """
    line = _find_line(error, file_name, is_compiled)  # before the traceback is trimmed
    kind = _find_kind(error, is_compiled)
    try:
        message = str(error)
    except BaseException:
        message = "(its message could not be read)"
    try:
        text = _format_traceback(error, sources)
    except BaseException as failure:
        text = f"(the traceback could not be made: {type(failure).__name__})"
    code: Any = error.code if isinstance(error, SystemExit) else None
    return {
        "kind": kind,
        "type": type(error).__qualname__,
        "message": message[:MAX_TRACEBACK_CHARACTERS],
        "traceback": text,
        "exit_code": code if type(code) is int and abs(code) < 1 << 31 else None,
        "line": line,
    }


def clear_frames(error: BaseException) -> None:
    """Lets go of the local variables on the way of an error, so that there is memory to report with."""
    trace = error.__traceback__
    while trace is not None:
        try:
            trace.tb_frame.clear()
        except RuntimeError:
            pass  # a frame that is still running: the driver's own
        trace = trace.tb_next


def _find_kind(error: BaseException, is_compiled: bool) -> str:
    for name, kind in (
        ("memory", MemoryError),
        ("submit", SubmitError),
        ("volume", VolumeError),
        ("interrupted", Interrupted),
        ("exit", SystemExit),
    ):
        if isinstance(error, kind):
            return name
    if not is_compiled and isinstance(error, (SyntaxError, ValueError, RecursionError, OverflowError)):
        return "syntax"
    return "code"


def _find_line(error: BaseException, file_name: str, is_compiled: bool) -> int | None:
    """The line of the code that failed: the innermost that is the code's own."""
    if isinstance(error, SyntaxError) and not is_compiled:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file_name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _format_traceback(error: BaseException, sources: dict[str, str]) -> str:
    import linecache
    import traceback

    for name, source in sources.items():
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(DRIVER_FILE_PREFIX):
        first = first.tb_next
    trace = first
    last: Any = None
    while trace is not None:  # and the driver's frames at the other end: SUBMIT's, a tool's, the interrupt's
        if trace.tb_frame.f_code.co_filename.startswith(DRIVER_FILE_PREFIX):
            break
        last, trace = trace, trace.tb_next
    if last is not None:
        last.tb_next = None
    text = "".join(traceback.format_exception(type(error), error, first))
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return text
