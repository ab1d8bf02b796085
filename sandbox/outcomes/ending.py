"""How code ended: the driver's last frame, read as untrusted data, and the texts of its errors that name limits."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from signal import SIGBUS, SIGXCPU, SIGXFSZ, Signals
from typing import TYPE_CHECKING, Any

from ..wire.strict_json import MAX_CONTAINERS, dumps, has_too_many_containers, loads
from .advice import find_advice

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..meta import Meta

SIGNALS = {number.value: number.name for number in Signals}
SETUP_HINT = "Raise the sandbox's limits, or see rlm-batch doctor"
LIMITS = {  # parts of messages about limits on a whole sandbox, by option
    "total_memory_mib": "held more memory",
    "total_processes": "had more processes and threads", "processes": "had more processes and threads",
}  # fmt: skip
HIT_LIMITS = {  # options that set a limit (the lowest one applies) and a remedy, by the driver's name of the limit
    "processes": (("total_processes", "processes"), "have fewer processes and threads at a time"),
    "open_files": (("open_files",), "close files that are not needed"),
    "file_size": (("file_size_mib",), "write smaller files"),
    "memory": (("memory_mib",), "work on less at a time"),
    "disk": (("disk_mib",), "remove files that are not needed"),
    "shm": (("memory_mib",), "keep less in /dev/shm"),
}
# Python writes this text if it exits before it runs any code, because of a wrong environment variable.
FAILED_START = re.compile(r"(?m)^Fatal Python error: (.{1,200}).*\nPython runtime state: (?:pre|core )initializ")
MAX_TEXT_CHARACTERS = 21_000  # text of an error; the driver cuts it at 20,000 and adds a note


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an execution or of `prepare` that failed.

    Attributes:
        header: The header of the driver's last frame, with facts that the host added (`DriverProtocol._note_limit`).
        outcome: The body of the frame. Code may have written it.
        meta: The meta of the execution.
        timeout: Seconds that the code had; None for no limit.
        subject: "the code" or "prepare".
        type, message, traceback: The exception's; empty if there was none, but `message` may be the driver's.
        line: The line of the code that ran.
    """

    header: dict[str, Any]
    outcome: dict[str, Any]
    meta: Meta
    timeout: float | None
    subject: str
    type: str
    message: str
    traceback: str
    line: int | None

    @classmethod
    def read(
        cls, header: dict[str, Any], body: bytes, meta: Meta, timeout: float | None, subject: str = "the code"
    ) -> Ending:
        """Read the driver's last frame."""
        outcome: Any
        try:
            outcome = read_json(body)
        except (ValueError, RecursionError):
            header, outcome = {**header, "status": "channel"}, {"message": "an outcome that is not JSON"}
        outcome = outcome if isinstance(outcome, dict) else {}  # type: ignore[reportUnknownVariableType]
        found = (outcome.get(name) for name in ("type", "message", "traceback"))  # type: ignore[reportUnknownMemberType]
        texts = (text[:MAX_TEXT_CHARACTERS] if isinstance(text, str) else "" for text in found)
        return cls(header, outcome, meta, timeout, subject, *texts, read_integer(outcome, "line"))  # type: ignore[reportUnknownArgumentType]

    @property
    def where(self) -> str:
        """The line as text for a message."""
        return "" if self.line is None else f" (line {self.line})"

    @property
    def syntax_message(self) -> str:
        """A SyntaxError's message without the file and the line at its end."""
        return re.sub(r" \(<[^<>()]*>, line \d+\)$", "", self.message)

    @property
    def details(self) -> dict[str, Any]:
        """The attributes of a CodeError and of a PrepareError."""
        return {
            "type": self.type, "message": self.message, "traceback": self.traceback, "stdout": self.meta.stdout,
            "line": self.line,
        }  # fmt: skip

    def find_advice(self, variables: Collection[str] | None) -> str:
        """Return what the caller can do about the exception (see `advice.find_advice`)."""
        has_network = self.header["has_network"]
        return find_advice(
            self.type, self.message, self.traceback, self.meta.stderr, variables, has_network=has_network
        )

    def describe_crash(self) -> str:
        """Describe how the process of the code ended, with a remedy."""
        header, subject = self.header, self.subject
        if option := header.get("limit"):  # set by the host, so trusted
            return (
                f"the sandbox {LIMITS[option]} than `{option}` allows, and {subject} was killed: raise "
                f"{self._describe_option(option)}, or do less at a time"
            )
        if header.get("out_of_memory"):
            more = self.describe_more_memory()
            return f"the kernel killed {subject}, because memory ran out: work on less at a time, or {more}"
        signal, exit_code = read_integer(header, "signal"), read_integer(header, "exit_code")
        if signal == SIGXCPU:
            is_limited = "cpu_seconds" in header.get("limits", {})
            more = f"a higher {self._describe_option('cpu_seconds')}" if is_limited else "a longer timeout"
            return f"{subject} used up its CPU seconds: set {more}, or do less"
        if signal == SIGXFSZ:
            return (
                f"{subject} wrote a file that is too large{self.describe_limit('file_size') or ': write smaller files'}"
            )
        if signal is not None:
            name = SIGNALS.get(signal, f"signal {signal}")
            cause = "check native code, and what sends that signal"
            if signal == SIGBUS:
                cause = f"/dev/shm or the disk may be full{self.describe_limit('shm')}"
            return f"{subject}'s process was killed by {name}: {cause}"
        if failed_start := FAILED_START.search(self.meta.stderr):
            return f"Python could not start with this environment: {failed_start[1]}. Correct `environment`"
        return f"{subject}'s process exited with status {exit_code} before {subject} ended: check for os._exit"

    def describe_more_memory(self) -> str:
        """Describe how to get more memory, with the option if the provider has one."""
        option = self.header["memory_option"]  # set by the host, so trusted
        return f"give the sandbox more with {self._describe_option(option)}" if option else "give the sandbox more"

    def describe_shortage(self) -> str:
        """Return a remedy for a process that the driver could not start, to be added to the driver's message."""
        is_of_processes = os.strerror(errno.EAGAIN) in self.message
        return (self.describe_limit("processes") if is_of_processes else "") or f". {SETUP_HINT}"

    def describe_limit(self, limit: object) -> str:
        """Return text to add to an error's message: the option that sets the limit, and a remedy. May be empty."""
        limits: Mapping[str, int] = self.header.get("limits", {})
        options, remedy = HIT_LIMITS.get(limit, ((), "")) if isinstance(limit, str) else ((), "")
        option = min((option for option in options if option in limits), key=limits.__getitem__, default="")
        if not option:
            return ""
        return f". `{option}` allows {limits[option]:,}: {remedy}, or set a higher `{option}`"

    def _describe_option(self, option: str) -> str:
        """Return an option with its value, if the provider has one."""
        value = self.header.get("limits", {}).get(option)
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
