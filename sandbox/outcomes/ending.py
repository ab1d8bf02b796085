"""The end of an execution: the driver's last frame, read as untrusted data, and the error built from it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
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
    from ..sandbox_api import Sandbox

SIGNALS = {number.value: number.name for number in Signals}
SETUP_HINT = "Raise the sandbox's limits, or see rlm-batch doctor"
HIT_LIMITS = {  # options that set a limit (the lowest one applies) and a remedy, by the driver's name of the limit
    "processes": (("total_processes", "processes"), "have fewer processes and threads at a time"),
    "open_files": (("open_files",), "close files that are not needed"),
    "file_size": (("file_size_mib",), "write smaller files"),
    "memory": (("memory_mib",), "work on less at a time"),
    "disk": (("disk_mib",), "remove files that are not needed"),
    "SIGBUS": (("memory_mib",), "keep less in /dev/shm"),
}
# Python writes this text if it exits before it runs any code, because of a wrong environment variable.
FAILED_START = re.compile(r"(?m)^Fatal Python error: (.{1,200}).*\nPython runtime state: (?:pre|core )initializ")
MAX_TEXT_CHARACTERS = 21_000  # text of an error; the driver cuts it at 20,000 and adds a note
MAX_PRINTED_LINES = 10  # last lines of the error output of `prepare` in its error
# The classes of errors by the status of the driver's last frame, and by the kind of an exception.
BY_STATUS: dict[str, type[RlmBatchError]] = {
    "timeout": ExecutionTimeout, "lost": StateLost, "setup": SandboxStartError, "unprepared": SandboxLost,
    "commit": VolumeError,
}  # fmt: skip
BY_KIND: dict[Any, type[RlmBatchError]] = {
    "submit": SubmitError, "volume": VolumeError, "memory": CodeCrashed, "exit": CodeCrashed, "syntax": CodeSyntaxError,
}  # fmt: skip
WITHOUT_TRACEBACK = ("submit", "volume", "exit", "threads")


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an execution or of `prepare` that failed.

    Attributes:
        sandbox: The sandbox, whose limits messages name.
        header: The header of the driver's last frame.
        outcome: The body of the frame. Code may have written it.
        meta: The meta of the execution.
        timeout: Seconds that the code had; None for no limit.
        subject: "the code" or "prepare".
        limit: The sandbox-wide limit that made the kernel kill the code; "" if there was none.
        kind: The driver's kind of an exception; None for another end.
        type, message, traceback: The exception's; empty if there was none, but `message` may be the driver's.
        line: The line of the code that ran.
    """

    sandbox: Sandbox
    header: dict[str, Any]
    outcome: dict[str, Any]
    meta: Meta
    timeout: float | None
    subject: str
    limit: str
    kind: Any
    type: str
    message: str
    traceback: str
    line: int | None

    @classmethod
    def read(cls, pending: PendingExecution, meta: Meta, subject: str = "the code") -> Ending:
        """Read the driver's last frame."""
        assert pending.end is not None
        (header, body), sandbox, value = pending.end, pending.protocol.sandbox, None
        try:
            value = read_json(body)
        except (ValueError, RecursionError):
            header, value = {**header, "status": "channel"}, {"message": "an outcome that is not JSON"}
        is_killed = header["status"] == "crashed" and header.get("signal") == SIGKILL
        limit = sandbox.find_exceeded_limit() if is_killed else ""
        outcome: dict[str, Any] = value if isinstance(value, dict) else {}  # type: ignore[reportUnknownVariableType]
        found = [outcome.get(name) for name in ("type", "message", "traceback")]
        texts = [text[:MAX_TEXT_CHARACTERS] if isinstance(text, str) else "" for text in found]
        kind = outcome.get("kind") if header["status"] == "error" else None
        kind = kind if isinstance(kind, str) else None
        timeout, line = pending.request.timeout, read_integer(outcome, "line")
        return cls(sandbox, header, outcome, meta, timeout, subject, limit, kind, *texts, line=line)

    def build_error(self) -> RlmBatchError:
        """Return the error."""
        status, is_preparation = self.header["status"], self.subject == "prepare"
        text, advice = self._describe(), ""
        if self.header.get("state_lost"):
            text += ". The state of earlier executions is lost."
        if status == "error" and (self.kind == "syntax" or self.kind not in BY_KIND):
            names, errors = None if is_preparation else self.meta.variables, self.meta.stderr
            has_network = self.sandbox.has_network
            advice = find_advice(self.type, self.message, self.traceback, errors, names, has_network=has_network)
        # Such as the traceback of a program that `prepare` started:
        printed = self.meta.stderr.rstrip().splitlines()[-MAX_PRINTED_LINES:] if is_preparation else []
        traceback = "" if self.kind in WITHOUT_TRACEBACK else self.traceback
        text = "\n".join(filter(None, (text, *printed, traceback.rstrip() if advice else traceback, advice)))
        kind = BY_KIND.get(self.kind, CodeError) if status == "error" else BY_STATUS.get(status, CodeCrashed)
        if is_preparation:
            kind = SandboxStartError if status == "setup" else PrepareError
        return self._set_attributes(kind(text), traceback, advice)

    def _set_attributes(self, error: RlmBatchError, traceback: str, advice: str) -> RlmBatchError:
        error.meta = self.meta
        if isinstance(error, CodeError | PrepareError):
            error.type, error.message, error.traceback = self.type, self.message, traceback
            error.stdout, error.line, error.advice = self.meta.stdout, self.line, advice
        if isinstance(error, CodeCrashed):
            is_killed = bool(self.header.get("out_of_memory")) or self.limit == "total_memory_mib"
            error.out_of_memory = is_killed or self.kind == "memory"
            error.exit_code, error.signal = read_integer(self.header, "exit_code"), read_integer(self.header, "signal")
            if self.kind == "exit":
                status = read_integer(self.outcome, "exit_code")
                error.exit_code = 1 if status is None else status
        if isinstance(error, ExecutionTimeout):
            error.timeout, error.traceback, error.stdout = self.timeout or 0.0, traceback, self.meta.stdout
        if isinstance(error, VolumeError):
            error.is_failure_of_code = self.header["status"] == "error"
        return error

    def _describe(self) -> str:
        """Return what happened, with a remedy."""
        subject, message = self.subject, self.message
        where = "" if self.line is None else f" (line {self.line})"
        match self.header["status"]:
            case "timeout":
                option = "`prepare_timeout`" if subject == "prepare" else "`timeout`"
                cpu = self.meta.cpu_seconds
                spent = "" if cpu is None else f", with {cpu:.1f} s of CPU time"
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
                is_of_processes = os.strerror(errno.EAGAIN) in message
                remedy = self._describe_limit("processes") if is_of_processes else ""
                return f"{subject} did not run: {message}{remedy or f'. {SETUP_HINT}'}"
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
        subject, message = self.subject, self.message
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
                hint = self._describe_limit(self.outcome.get("limit"))
                return f"{subject} raised {self.type}{where}: {message.rstrip('.') if hint else message}{hint}"

    def _describe_crash(self) -> str:
        """Describe how the process of the code ended, with a remedy."""
        header, subject = self.header, self.subject
        if self.limit:
            option = self._describe_option(self.limit)
            return (
                f"the sandbox reached its `{self.limit}`, and {subject} was killed: raise {option}, "
                "or do less at a time"
            )
        if header.get("out_of_memory"):
            more = self._describe_more_memory()
            return f"the kernel killed {subject}, because memory ran out: work on less at a time, or {more}"
        signal, exit_code = read_integer(header, "signal"), read_integer(header, "exit_code")
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
        return f"{subject}'s process exited with status {exit_code} before {subject} ended: check for os._exit"

    def _describe_more_memory(self) -> str:
        is_crash = self.header["status"] == "crashed"
        option = self.sandbox.kill_memory_option if is_crash else self.sandbox.memory_option
        return f"give the sandbox more with {self._describe_option(option)}" if option else "give the sandbox more"

    def _describe_limit(self, limit: object) -> str:
        """Return text to add to an error's message: the option that sets the limit, and a remedy. May be empty."""
        limits = self.sandbox.limits
        options, remedy = HIT_LIMITS.get(limit, ((), "")) if isinstance(limit, str) else ((), "")
        option = min((option for option in options if option in limits), key=limits.__getitem__, default="")
        if not option:
            return ""
        return f". `{option}` allows {limits[option]:,}: {remedy}, or set a higher `{option}`"

    def _describe_option(self, option: str) -> str:
        """Return an option with its value, if the provider has one."""
        value = self.sandbox.limits.get(option)
        return f"`{option}`" + ("" if value is None else f" (it is {value:,})")


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
