"""A decoder that turns the end of an execution into a result or an error. It also decodes the displays.

The data is untrusted: code may have written it. Every value is checked before use.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from signal import SIGBUS, SIGXCPU, SIGXFSZ, Signals
from typing import TYPE_CHECKING, Any

from ..caller import get_caller, name_parameter
from ..errors import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ExecutionTimeout,
    RlmBatchError,
    SandboxLost,
    SandboxStartError,
    StateLost,
    SubmitError,
    VolumeError,
)
from ..model_reply import OPENING_FENCE
from ..result import Result
from ..wire.displays import MAX_REPR_CHARACTERS, check_bundle
from ..wire.frames import EXITED
from ..wire.nonfinite import restore_numbers
from ..wire.strict_json import MAX_CONTAINERS, dumps, has_too_many_containers, loads
from ..wire.submission import SubmissionError, check_submission
from .advice import find_advice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
MAX_SHOWN_CHARACTERS = MAX_REPR_CHARACTERS + 100  # text of a last value, with the note about omitted text
MAX_PEAK_KIB = 1 << 44  # largest credible memory of a process, 16 PiB
MAX_SECONDS = 1e9  # longest credible run time, 30 years; larger values did not come from our driver


def read_json(body: bytes) -> Any:
    """Parse JSON from a sandbox. Raises ValueError or RecursionError, also for text that UTF-8 cannot encode."""
    value = loads(body.decode("utf-8"))
    if has_too_many_containers(value, body):
        raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dicts")
    if b"\\u" in body:  # the driver escapes control characters only; untrusted JSON may have a lone surrogate
        dumps(value).encode("utf-8")
    return value


def decode_end(
    header: dict[str, Any],
    body: bytes,
    build_meta: Callable[..., Meta],
    timeout: float | None,
    output_fields: list[dict[str, str]] | None,
) -> Result:
    """Return the result in an execution's last frame, or raise the error in it.

    `build_meta` builds the meta; it takes further fields by keyword.
    """
    seconds = header.get("seconds")
    seconds = seconds if type(seconds) is float and 0 <= seconds < MAX_SECONDS else 0.0
    build_meta = functools.partial(build_meta, **_decode_usage(header))
    if header["status"] == "finished":
        return Result({}, build_meta(seconds=seconds, exited=body == EXITED))
    error: RlmBatchError
    if header["status"] == "submitted":
        try:
            fields = decode_submission(body, output_fields)
            return Result(fields, build_meta(seconds=seconds, submitted=True))
        except SubmissionError as reason:
            meta = build_meta(seconds=seconds)
            error = SubmitError(
                f"the code wrote an invalid result past SUBMIT: {reason}. Return values only with SUBMIT"
            )
    else:
        outcome: Any = None
        try:
            outcome = read_json(body)
        except (ValueError, RecursionError):
            header, outcome = {"status": "channel"}, {"message": "an outcome that is not JSON"}
        meta = build_meta(seconds=seconds)
        error = _build_error(header, outcome if isinstance(outcome, dict) else {}, meta, timeout)  # type: ignore[reportUnknownArgumentType]
    error.meta = meta
    raise error


def _decode_usage(header: dict[str, Any]) -> dict[str, Any]:
    """Return the meta's fields of CPU seconds and of peak memory, without values that are not credible."""
    microseconds, peak_kib = header.get("cpu_microseconds"), header.get("peak_kib")
    usage: dict[str, Any] = {}
    if type(microseconds) is int and 0 <= microseconds < MAX_SECONDS * 1e6:
        usage["cpu_seconds"] = microseconds / 1e6
    if type(peak_kib) is int and 0 < peak_kib < MAX_PEAK_KIB:
        usage["peak_mib"] = peak_kib * 10 // 1024 / 10
    return usage


def decode_submission(body: bytes, expected: list[dict[str, str]] | None) -> dict[str, Any]:
    """Return the submitted fields. Raises SubmissionError."""
    has_nonfinite = body.startswith(b"[")  # a list of the fields and their non-finite numbers
    try:
        value = read_json(body)
        if has_nonfinite:
            if len(value) != 2 or type(value[1]) is not dict:
                raise ValueError("not a list of fields and their non-finite numbers")
            value, numbers = value
            restore_numbers(value, numbers)
    except (ValueError, RecursionError) as error:
        raise SubmissionError(f"it is not strict JSON ({type(error).__name__}: {str(error)[:100]})") from None
    return check_submission(value, body, expected)


def _build_error(header: dict[str, Any], outcome: dict[str, Any], meta: Meta, timeout: float | None) -> RlmBatchError:
    """Return the error for an execution's end. The outcome is untrusted data of the code."""
    status, kind = header["status"], outcome.get("kind")
    name, message, traceback = (read_text(outcome, field) for field in ("type", "message", "traceback"))
    line = read_integer(outcome, "line")
    where = f" (line {line})" if line is not None else ""
    state_note = " The state of earlier executions is lost." if header.get("state_lost") else ""
    details: dict[str, Any] = {
        "type": name, "message": message, "traceback": traceback, "stdout": meta.stdout, "line": line,
    }  # fmt: skip
    if status == "timeout":
        return ExecutionTimeout(
            f"the code was still running{where} after its timeout of {timeout or 0:g} s{_describe_cpu(header, meta)}; "
            f"give it more with {name_parameter('timeout')}, or less to do.{state_note}"
            + (f"\n{traceback}" if traceback else ""),
            timeout=timeout or 0.0,
            traceback=traceback,
            stdout=meta.stdout,
        )
    if status == "crashed":
        text = describe_crash(header, meta.stderr)
        return CodeCrashed(
            f"{text}.{state_note}" if state_note else text,
            exit_code=read_integer(header, "exit_code"),
            signal=read_integer(header, "signal"),
            out_of_memory=bool(header.get("out_of_memory")) or header.get("limit") == "total_memory_mib",
            **details,
        )
    if status == "channel":
        return CodeCrashed(
            f"the code wrote to a file descriptor of the sandbox ({message}): write only to files that "
            f"the code opens.{state_note}",
            **details,
        )
    if status == "replies":
        return CodeCrashed(
            f"the code was ended, because of {message}: wait for each answer of a host function, or make "
            f"fewer calls at a time.{state_note}",
            **details,
        )
    if status == "lost":
        return StateLost(
            f"the state of the earlier executions is lost: {message}. Start again with the first step, "
            "after reset() or in a new context"
        )
    if status == "unconfined":
        return CodeCrashed(f"the code did not run: {message}. See rlm-batch doctor", **details)
    if status == "setup":
        return SandboxStartError(f"the code was not run: {message}{describe_shortage(header, message)}")
    if status == "unprepared":
        return SandboxLost(f"the code did not run: {message}. Run it in a new sandbox")
    if status == "commit":
        return VolumeError(
            "the code succeeded, but its files on the volume could not be committed, and others may not "
            f"see them: {message}. Run it again"
        )
    if status == "cancelled":
        return CodeCrashed(f"the execution was cancelled.{state_note}", **details)
    if kind == "submit":
        return SubmitError(f"{message}{where}")
    if kind == "volume":
        return VolumeError(f"{message}{where}", is_failure_of_code=True)
    if kind == "memory":
        more = describe_more_memory(header)
        return CodeCrashed(
            f"the code ran out of memory{where}: work on less at a time, or {more}\n{traceback}",
            out_of_memory=True,
            **details,
        )
    if kind == "exit":
        code = read_integer(outcome, "exit_code")
        last_line = meta.stderr.rstrip().rpartition("\n")[2]  # argparse and unittest print the reason there
        reason = f", and the last line on stderr is {last_line[-200:]!r}" if last_line else ""
        return CodeCrashed(
            f"the code called exit({message if code is None else code}){where} before SUBMIT{reason}: return values "
            "with SUBMIT, which also ends the code",
            exit_code=1 if code is None else code,
            **details,
        )
    advice = find_advice(name, message, traceback, meta.stderr, meta.variables, has_network=header["has_network"])
    if kind == "syntax":
        fence = OPENING_FENCE.search(traceback)
        tag = fence["tag"][:40] if fence else ""
        hint = f". It is in a Markdown fence of {tag!r}, which is not Python" if tag else ""
        said = remove_place(message)
        text = f"the code is not valid Python{where}: {said}{hint}\n{traceback}"
        return CodeSyntaxError(f"{text.rstrip()}\n{advice}" if advice else text, advice=advice, **details)
    hint = describe_limit(header, outcome)
    said = message.rstrip(".") if hint else message
    text = f"the code raised {name}{where}: {said}{hint}\n{traceback}"
    return CodeError(f"{text.rstrip()}\n{advice}" if advice else text, advice=advice, **details)


def remove_place(message: str) -> str:
    """Return a SyntaxError's message without the file and the line at its end."""
    return re.sub(r" \(<[^<>()]*>, line \d+\)$", "", message)


def read_text(outcome: dict[str, Any], name: str) -> str:
    """Return a text of an outcome, cut to the driver's length limit, or an empty string if it is missing."""
    text = outcome.get(name)
    return text[:MAX_TEXT_CHARACTERS] if isinstance(text, str) else ""


def read_integer(values: dict[str, Any], name: str) -> int | None:
    """Return a 64-bit integer of an outcome or a header, or None if it is missing."""
    value = values.get(name)
    return value if type(value) is int and abs(value) < 1 << 63 else None


def describe_crash(header: dict[str, Any], stderr: str, subject: str = "the code") -> str:
    """Describe how the process of the code ended, with a remedy. `subject` is the name of the code in the message."""
    if option := header.get("limit"):  # set by the host, so trusted
        return (
            f"the sandbox {LIMITS[option]} than {name_parameter(option)} allows, and {subject} was "
            f"killed: raise {name_parameter(option)}{_describe_value(header, option)}, or do less at a "
            "time"
        )
    if header.get("out_of_memory"):
        more = describe_more_memory(header)
        return f"the kernel killed {subject}, because memory ran out: work on less at a time, or {more}"
    signal, exit_code = read_integer(header, "signal"), read_integer(header, "exit_code")
    if signal == SIGXCPU:
        more = "a longer timeout"
        if "cpu_seconds" in _get_limits(header):
            more = f"a higher {name_parameter('cpu_seconds')}{_describe_value(header, 'cpu_seconds')}"
        return f"{subject} used up its CPU seconds: set {more}, or do less"
    if signal == SIGXFSZ:
        hint = describe_limit(header, {"limit": "file_size"}) or ": write smaller files"
        return f"{subject} wrote a file that is too large{hint}"
    if signal is not None:
        name = SIGNALS.get(signal, f"signal {signal}")
        cause = "check native code, and what sends that signal"
        if signal == SIGBUS:
            cause = f"/dev/shm or the disk may be full{describe_limit(header, {'limit': 'shm'})}"
        return f"{subject}'s process was killed by {name}: {cause}"
    if failed_start := FAILED_START.search(stderr):
        return f"Python could not start with this environment: {failed_start[1]}. Correct `environment`"
    return f"{subject}'s process exited with status {exit_code} before {subject} ended: check for os._exit"


def _describe_cpu(header: dict[str, Any], meta: Meta) -> str:
    """Return the CPU time that code got until its timeout, and whether too many workers shared the cores."""
    if meta.cpu_seconds is None:
        return ""
    cores, workers = len(os.sched_getaffinity(0)), get_caller().workers
    is_starved = 0.1 < meta.cpu_seconds / max(meta.seconds, 0.1) < 0.8  # Code below this share waits for other things.
    is_crowded = header["shares_cores"] and workers > cores and is_starved
    crowd = f" ({workers} workers share {cores} cores: lower {name_parameter('max_workers')})" if is_crowded else ""
    return f", with {meta.cpu_seconds:.1f} s of CPU time{crowd}"


def describe_more_memory(header: dict[str, Any]) -> str:
    """Describe how to get more memory, with the option if the provider has one."""
    option = header["memory_option"]  # set by the host, so trusted
    more = f" with {name_parameter(option)}{_describe_value(header, option)}" if option else ""
    return f"give the sandbox more{more}"


def describe_shortage(header: dict[str, Any], message: str) -> str:
    """Return a remedy for a process that the driver could not start, to be added to the driver's message."""
    is_of_processes = os.strerror(errno.EAGAIN) in message
    return (describe_limit(header, {"limit": "processes"}) if is_of_processes else "") or f". {SETUP_HINT}"


def describe_limit(header: dict[str, Any], outcome: dict[str, Any]) -> str:
    """Return text to add to an error's message: the option whose limit caused the error, and a remedy. May be empty."""
    limit, limits = outcome.get("limit"), _get_limits(header)
    options, remedy = HIT_LIMITS.get(limit, ((), "")) if isinstance(limit, str) else ((), "")
    option = min((option for option in options if option in limits), key=limits.__getitem__, default="")
    if not option:
        return ""
    name = name_parameter(option)
    return f". {name} allows {limits[option]:,}: {remedy}, or set a higher {name}"


def _describe_value(header: dict[str, Any], option: str) -> str:
    value = _get_limits(header).get(option)
    return "" if value is None else f" (it is {value:,})"


def _get_limits(header: dict[str, Any]) -> Mapping[str, int]:
    return header.get("limits", {})  # set by the host in `DriverProtocol._note_limit`, so trusted


def decode_shown(value: bytes | None, displays: list[bytes]) -> dict[str, Any]:
    """Return the non-empty fields of the meta: `value` or `value_repr`, and `displays`. Invalid data is ignored."""
    shown: dict[str, Any] = {}
    if value is not None:
        try:
            fields = decode_submission(value, None)
        except SubmissionError:
            fields = {}
        text = fields.get("repr")
        if fields.get("value") is not None:
            shown["value"] = fields["value"]
        elif isinstance(text, str):
            shown["value_repr"] = text[:MAX_SHOWN_CHARACTERS]
    bundles: list[dict[str, Any]] = []
    for body in displays:
        try:
            bundles.append(check_bundle(read_json(body), body))
        except (ValueError, RecursionError):
            continue
    if bundles:
        shown["displays"] = tuple(bundles)
    return shown
