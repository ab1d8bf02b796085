"""A decoder that turns the end of an execution into a result or an error. It also decodes the displays.

The data is untrusted: code may have written it. Every value is checked before use.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

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
from ..wire.submission import SubmissionError, check_submission
from .ending import Ending, read_integer, read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..meta import Meta

MAX_SHOWN_CHARACTERS = MAX_REPR_CHARACTERS + 100  # text of a last value, with the note about omitted text
MAX_PEAK_KIB = 1 << 44  # largest credible memory of a process, 16 PiB
MAX_SECONDS = 1e9  # longest credible run time, 30 years; larger values did not come from our driver


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
        meta = build_meta(seconds=seconds)
        error = _build_error(Ending.read(header, body, meta, timeout))
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


def _build_error(end: Ending) -> RlmBatchError:
    """Return the error for the end of an execution that is no exception of its code."""
    lost = " The state of earlier executions is lost." if end.header.get("state_lost") else ""
    message = end.message
    match end.header["status"]:
        case "timeout":
            text = (
                f"the code was still running{end.where} after its timeout of {end.timeout or 0:g} s"
                f"{_describe_cpu(end)}; give it more with `timeout`, or less to do.{lost}"
            )
            return ExecutionTimeout(
                f"{text}\n{end.traceback}".rstrip(),
                timeout=end.timeout or 0.0,
                traceback=end.traceback,
                stdout=end.meta.stdout,
            )
        case "crashed":
            return CodeCrashed(
                f"{end.describe_crash()}{lost and f'.{lost}'}",
                exit_code=read_integer(end.header, "exit_code"),
                signal=read_integer(end.header, "signal"),
                out_of_memory=bool(end.header.get("out_of_memory")) or end.header.get("limit") == "total_memory_mib",
                **end.details,
            )
        case "lost":
            return StateLost(
                f"the state of the earlier executions is lost: {message}. Start again with the first step, "
                "after reset() or in a new context"
            )
        case "setup":
            return SandboxStartError(f"the code was not run: {message}{end.describe_shortage()}")
        case "unprepared":
            return SandboxLost(f"the code did not run: {message}. Run it in a new sandbox")
        case "commit":
            return VolumeError(
                "the code succeeded, but its files on the volume could not be committed, and others may not "
                f"see them: {message}. Run it again"
            )
        case "unconfined":
            text = f"the code did not run: {message}. See rlm-batch doctor"
        case "channel":
            text = (
                f"the code wrote to a file descriptor of the sandbox ({message}): write only to files that "
                f"the code opens.{lost}"
            )
        case "replies":
            text = (
                f"the code was ended, because of {message}: wait for each answer of a host function, or make "
                f"fewer calls at a time.{lost}"
            )
        case "cancelled":
            text = f"the execution was cancelled.{lost}"
        case _:
            return _build_exception_error(end)
    return CodeCrashed(text, **end.details)


def _build_exception_error(end: Ending) -> RlmBatchError:
    """Return the error for an exception that ended the code."""
    message, where = end.message, end.where
    match end.outcome.get("kind"):
        case "submit":
            return SubmitError(f"{message}{where}")
        case "volume":
            return VolumeError(f"{message}{where}", is_failure_of_code=True)
        case "memory":
            more = end.describe_more_memory()
            text = f"the code ran out of memory{where}: work on less at a time, or {more}\n{end.traceback}"
            return CodeCrashed(text, out_of_memory=True, **end.details)
        case "exit":
            status = read_integer(end.outcome, "exit_code")
            last_line = end.meta.stderr.rstrip().rpartition("\n")[2]  # argparse and unittest print the reason there
            reason = f", and the last line on stderr is {last_line[-200:]!r}" if last_line else ""
            text = (
                f"the code called exit({message if status is None else status}){where} before SUBMIT{reason}: return "
                "values with SUBMIT, which also ends the code"
            )
            return CodeCrashed(text, exit_code=1 if status is None else status, **end.details)
        case "syntax":
            fence = OPENING_FENCE.search(end.traceback)
            tag = fence["tag"][:40] if fence else ""
            hint = f". It is in a Markdown fence of {tag!r}, which is not Python" if tag else ""
            text = f"the code is not valid Python{where}: {end.syntax_message}{hint}"
        case _:
            hint = end.describe_limit(end.outcome.get("limit"))
            text = f"the code raised {end.type}{where}: {message.rstrip('.') if hint else message}{hint}"
    advice = end.find_advice(end.meta.variables)
    make_error = CodeSyntaxError if end.outcome.get("kind") == "syntax" else CodeError
    text = f"{text}\n{end.traceback}"
    return make_error(f"{text.rstrip()}\n{advice}" if advice else text, advice=advice, **end.details)


def _describe_cpu(end: Ending) -> str:
    """Return the CPU time that code got until its timeout, and a hint if it waited for the cores."""
    meta = end.meta
    if meta.cpu_seconds is None:
        return ""
    is_starved = 0.1 < meta.cpu_seconds / max(meta.seconds, 0.1) < 0.8  # Code below this share waits for other things.
    is_crowded = end.header["shares_cores"] and is_starved
    crowd = f" (with more workers than the {os.cpu_count()} cores, lower `max_workers`)" if is_crowded else ""
    return f", with {meta.cpu_seconds:.1f} s of CPU time{crowd}"


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
