"""The errors of executions, built from the driver's last frame, which is untrusted."""

from __future__ import annotations

import errno
import os
import re
from signal import SIGKILL, SIGXCPU, SIGXFSZ, Signals
from typing import TYPE_CHECKING, Any

from ..errors import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ExecutionTimeout,
    PrepareError,
    RlmBatchError,
    SandboxLost,
    SandboxStartError,
    StateLost,
    SubmitError,
    VolumeError,
)
from ..model_reply import OPENING_FENCE
from ..wire.strict_json import MAX_CONTAINERS, dumps, has_too_many_containers, loads
from .advice import find_advice

if TYPE_CHECKING:
    from ..meta import Meta
    from ..protocol import PendingExecution

SIGNALS = {number.value: number.name for number in Signals}
SETUP_HINT = "Raise the sandbox's limits, or see rlm-batch doctor"
# The options that set a limit, and a remedy, by the driver's name of the limit.
HIT_LIMITS = {
    "processes": (("total_processes", "processes"), "have fewer processes and threads at a time"),
    "open_files": (("open_files",), "close files that are not needed"),
    "file_size": (("file_size_mib",), "write smaller files"),
    "memory": (("memory_mib",), "work on less at a time"),
    "disk": (("disk_mib",), "remove files that are not needed"),
    "SIGBUS": (("memory_mib",), "keep less in /dev/shm"),
}
# Python writes this text if it exits before it runs any code, because of a wrong environment variable.
FAILED_START = re.compile(r"(?m)^Fatal Python error: (.{1,200}).*\nPython runtime state: (?:pre|core )initializ")
CUT_CHARACTERS = 20_000  # The driver cuts a message there. It cuts a traceback, too, and adds a note.
MAX_TEXT_CHARACTERS = 21_000
MAX_PRINTED_LINES = 10  # last lines of the error output of `prepare` in its error
# The classes of errors by the status of the driver's last frame, and by the driver's kind of an exception.
BY_STATUS: dict[str, type[RlmBatchError]] = {
    "timeout": ExecutionTimeout, "lost": StateLost, "setup": SandboxStartError, "unprepared": SandboxLost,
    "commit": VolumeError,
}  # fmt: skip
BY_KIND: dict[Any, type[RlmBatchError]] = {
    "submit": SubmitError, "volume": VolumeError, "memory": CodeCrashed, "exit": CodeCrashed, "syntax": CodeSyntaxError,
}  # fmt: skip
WITHOUT_TRACEBACK = ("submit", "volume", "exit", "threads")


def build_error(pending: PendingExecution, meta: Meta, subject: str = "the code") -> RlmBatchError:
    """Return the error of an execution that failed, or of `prepare` if that is the subject."""
    return _Ending(pending, meta, subject).build_error()


class _Ending:
    """The end of an execution or of `prepare` that failed. The body of the last frame may be forged by code.

    Attributes:
        outcome: The values in the body of the last frame.
        kind: The driver's kind of an exception; empty for another end.
        type, message, traceback: The exception's. Without an exception, `message` may be the driver's.
        limit: The sandbox-wide limit that made the kernel kill the code; empty if there was none.
    """

    def __init__(self, pending: PendingExecution, meta: Meta, subject: str) -> None:
        assert pending.end is not None
        self.header, body = pending.end
        self.status: str = self.header["status"]
        self.sandbox = pending.protocol.sandbox
        self.timeout = pending.request.timeout
        self.work_time = pending.request.work_time
        self.meta = meta
        self.subject = subject
        self.is_preparation = subject == "prepare"
        try:
            value = read_json(body)
        except (ValueError, RecursionError):
            self.status = "channel"
            value = {"message": "an outcome that is not JSON"}
        self.outcome: dict[str, Any] = value if isinstance(value, dict) else {}  # type: ignore[reportUnknownMemberType]
        self.type = self._read_shown_text("type")
        self.message = self._read_shown_text("message")
        self.traceback = self._read_shown_text("traceback")
        self.kind = self._read_text("kind") if self.status == "error" else ""
        self.line = read_integer(self.outcome, "line")
        self.limit = ""
        if self.status == "crashed" and self.header.get("signal") == SIGKILL:
            self.limit = self.sandbox.find_exceeded_limit()

    def _read_text(self, name: str) -> str:
        value = self.outcome.get(name)
        return value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else ""

    def _read_shown_text(self, name: str) -> str:
        text, hide = self._read_text(name), self.sandbox.hide
        if hide is None:
            return text
        return hide.hide_before_cut(text) if len(text) == CUT_CHARACTERS else hide(text)

    def build_error(self) -> RlmBatchError:
        """Return the error with its text: what happened, the traceback, and advice."""
        traceback = "" if self.kind in WITHOUT_TRACEBACK else self.traceback
        advice = self._find_advice()
        lines = [self._describe()]
        if self.header.get("state_lost"):
            lines[0] += ". The state of earlier executions is lost."
        if self.is_preparation:  # A program that `prepare` started may have printed a traceback.
            lines += self.meta.stderr.rstrip().splitlines()[-MAX_PRINTED_LINES:]
        lines += [traceback.rstrip() if advice else traceback, advice]
        error = self._find_class()("\n".join(filter(None, lines)))
        error.meta = self.meta
        self._set_attributes(error, traceback, advice)
        return error

    def _find_advice(self) -> str:
        is_known = self.kind in BY_KIND and self.kind != "syntax"  # The error's class says what to do.
        if self.status != "error" or is_known:
            return ""
        return find_advice(
            self.type,
            self.message,
            self.traceback,
            self.meta.stderr,
            None if self.is_preparation else self.meta.variables,
            has_network=self.sandbox.has_network,
        )

    def _find_class(self) -> type[RlmBatchError]:
        if self.is_preparation:
            return SandboxStartError if self.status == "setup" else PrepareError
        if self.status == "error":
            return BY_KIND.get(self.kind, CodeError)
        is_interrupted = self.status == "cancelled" and self.work_time is not None
        if is_interrupted and not self.header.get("state_lost"):
            return ExecutionTimeout
        return BY_STATUS.get(self.status, CodeCrashed)

    def _set_attributes(self, error: RlmBatchError, traceback: str, advice: str) -> None:
        if isinstance(error, CodeError | PrepareError):
            error.type = self.type
            error.message = self.message
            error.traceback = traceback
            error.stdout = self.meta.stdout
            error.line = self.line
            error.advice = advice
        if isinstance(error, CodeCrashed):
            is_killed = bool(self.header.get("out_of_memory")) or self.limit == "total_memory_mib"
            error.out_of_memory = is_killed or self.kind == "memory"
            error.exit_code = read_integer(self.header, "exit_code")
            error.signal = read_integer(self.header, "signal")
            if self.kind == "exit":
                status = read_integer(self.outcome, "exit_code")
                error.exit_code = 1 if status is None else status
        if isinstance(error, ExecutionTimeout):
            error.timeout = self.timeout or 0.0 if self.work_time is None else self.work_time.limit
            error.traceback = traceback
            error.stdout = self.meta.stdout
        if isinstance(error, VolumeError):
            error.is_failure_of_code = self.status == "error"

    def _describe(self) -> str:
        """Return what happened, with a remedy."""
        subject = self.subject
        message = self.message
        where = "" if self.line is None else f" (line {self.line})"
        match self.status:
            case "timeout":
                option = "`prepare_timeout`" if self.is_preparation else "`timeout`"
                cpu_seconds = self.meta.cpu_seconds
                spent = "" if cpu_seconds is None else f", with {cpu_seconds:.1f} s of CPU time"
                return (
                    f"{subject} was still running{where} after its timeout of {self.timeout or 0:g} s{spent}; give it "
                    f"more with {option}, or less to do"
                )
            case "crashed":
                return self._describe_crash()
            case "lost":
                return (
                    f"the state of the earlier executions is lost: {message}. Start again with the first step, "
                    "after reset() or in a new context"
                )
            case "setup":
                remedy = ""
                if os.strerror(errno.EAGAIN) in message:  # The limit of processes was reached.
                    remedy = self._describe_limit("processes")
                if not remedy:
                    remedy = f". {SETUP_HINT}"
                return f"{subject} did not run: {message}{remedy}"
            case "unprepared":
                return f"{subject} did not run: {message}. Run it in a new sandbox"
            case "commit":
                return (
                    f"{subject} succeeded, but its files on the volume could not be committed, and others may not see "
                    f"them: {message}. Run it again"
                )
            case "unconfined":
                return f"{subject} did not run: {message}. See rlm-batch doctor"
            case "replies":
                return (
                    f"{subject} was ended, because of {message}: wait for each answer of a host function, or make "
                    "fewer calls at a time"
                )
            case "cancelled" if self.work_time is not None:
                seconds = f"{self.work_time.limit:g} s"
                return f"{subject} was interrupted{where} after {seconds}, the most for a turn: do less in a turn"
            case "cancelled":
                return "the execution was cancelled"
            case "error":
                return self._describe_exception(where)
            case status:
                return (
                    f"{subject} wrote to a file descriptor of the sandbox ({message or status}): write only to files "
                    "that it opens"
                )

    def _describe_exception(self, where: str) -> str:
        """Describe the exception that ended the code, by its kind."""
        subject = self.subject
        message = self.message
        match self.kind:
            case "submit" | "volume":
                return f"{message}{where}"
            case "memory":
                more = self._describe_more_memory()
                return f"{subject} ran out of memory{where}: work on less at a time, or {more}"
            case "exit":
                status = read_integer(self.outcome, "exit_code")
                last_line = self.meta.stderr.rstrip().rpartition("\n")[2][-200:]  # argparse prints the reason there
                reason = f", and its last line on stderr is {last_line!r}" if last_line else ""
                remedy = "let it end without exit, or return values with SUBMIT, which also ends the code"
                shown = message if status is None else status
                return f"{subject} called exit({shown}){where} before it ended{reason}: {remedy}"
            case "syntax":
                fence = OPENING_FENCE.search(self.traceback)
                tag = fence["tag"][:40] if fence else ""
                hint = f". It is in a Markdown fence of {tag!r}, which is not Python" if tag else ""
                problem = re.sub(r" \(<[^<>()]*>, line \d+\)$", "", message)
                return f"{subject} is not valid Python{where}: {problem}{hint}"
            case "threads":
                return f"prepare left these threads running, which forks do not have: {message}. End them in prepare"
            case _:
                hint = self._describe_limit(self._read_text("limit"))
                if hint:  # It begins with a full stop.
                    message = message.rstrip(".")
                return f"{subject} raised {self.type}{where}: {message}{hint}"

    def _describe_crash(self) -> str:
        """Describe how the process of the code ended, with a remedy."""
        subject = self.subject
        if self.limit:
            option = self._describe_option(self.limit)
            return (
                f"the sandbox reached its `{self.limit}`, and {subject} was killed: raise {option}, "
                "or do less at a time"
            )
        if self.header.get("out_of_memory"):
            more = self._describe_more_memory()
            return f"the kernel killed {subject}, because memory ran out: work on less at a time, or {more}"
        signal = read_integer(self.header, "signal")
        if signal == SIGXCPU:
            return f"{subject} used up its CPU seconds: raise its timeout or `cpu_seconds`, or do less"
        if signal == SIGXFSZ:
            return f"{subject} wrote a file that is too large{self._describe_limit('file_size')}"
        if signal is not None:
            name = SIGNALS.get(signal, f"signal {signal}")
            cause = f"check native code, and what sends that signal{self._describe_limit(name)}"
            return f"{subject}'s process was killed by {name}: {cause}"
        if failed_start := FAILED_START.search(self.meta.stderr):
            return f"Python could not start with this environment: {failed_start[1]}. Correct `environment`"
        status = read_integer(self.header, "exit_code")
        return f"{subject}'s process exited with status {status} before {subject} ended: check for os._exit"

    def _describe_more_memory(self) -> str:
        option = self.sandbox.kill_memory_option if self.status == "crashed" else self.sandbox.memory_option
        return f"give the sandbox more with {self._describe_option(option)}" if option else "give the sandbox more"

    def _describe_limit(self, limit: str) -> str:
        """Return text to add to an error's message: the option that sets the limit, and a remedy. May be empty."""
        limits = self.sandbox.limits
        options, remedy = HIT_LIMITS.get(limit, ((), ""))
        values = {option: limits[option] for option in options if option in limits}
        if not values:
            return ""
        lowest = min(values, key=values.__getitem__)  # The lowest limit is the one that the code reached.
        return f". `{lowest}` allows {values[lowest]:,}: {remedy}, or set a higher `{lowest}`"

    def _describe_option(self, option: str) -> str:
        """Return an option and its value if the provider has one."""
        value = self.sandbox.limits.get(option)
        return f"`{option}`" if value is None else f"`{option}` (it is {value:,})"


def read_json(body: bytes) -> Any:
    """Parse JSON from a sandbox. Raises ValueError or RecursionError, also for text that UTF-8 cannot encode."""
    value = loads(body.decode("utf-8"))
    if has_too_many_containers(value, body):
        raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dicts")
    if b"\\u" in body:  # the driver escapes control characters only; untrusted JSON may have a lone surrogate
        dumps(value).encode("utf-8")
    return value


def read_integer(values: dict[str, Any], name: str) -> int | None:
    """Return a 64-bit integer of an outcome or a header, or None if it is missing."""
    value = values.get(name)
    return value if type(value) is int and abs(value) < 1 << 63 else None
