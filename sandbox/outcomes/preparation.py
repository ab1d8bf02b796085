"""A decoder for the end of `prepare` code, which succeeds or raises an error.

As in `decoding`, the data is untrusted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..caller import name_parameter
from ..errors import PrepareError, RlmBatchError, SandboxStartError
from .advice import find_advice
from .decoding import (
    describe_crash,
    describe_limit,
    describe_more_memory,
    describe_shortage,
    read_integer,
    read_json,
    read_text,
    remove_place,
)

if TYPE_CHECKING:
    from ..meta import Meta

MAX_PRINTED_LINES = 10  # last lines of the error output in an error


def check_preparation(header: dict[str, Any], body: bytes, meta: Meta, timeout: float | None) -> None:
    """Return if the preparation succeeded; otherwise raise its error, with `meta`."""
    if header["status"] == "finished":
        return
    outcome: Any = None
    with suppress(ValueError, RecursionError):
        outcome = read_json(body)
    error = _build_error(header, outcome if isinstance(outcome, dict) else {}, meta, timeout)  # type: ignore[reportUnknownArgumentType]
    error.meta = meta
    raise error


def _build_error(header: dict[str, Any], outcome: dict[str, Any], meta: Meta, timeout: float | None) -> RlmBatchError:
    status, kind = header["status"], outcome.get("kind")
    name, message, traceback = (read_text(outcome, field) for field in ("type", "message", "traceback"))
    line = read_integer(outcome, "line")
    where = f" (line {line})" if line is not None else ""
    if status == "setup":
        return SandboxStartError(f"prepare did not run: {message}{describe_shortage(header, message)}")
    if status == "timeout":
        text = (
            f"prepare was still running{where} after its {name_parameter('prepare_timeout')} of "
            f"{timeout or 0:g} s: raise it, or do less in prepare"
        )
    elif status == "crashed":
        text = describe_crash(header, meta.stderr, "prepare")
    elif status == "unconfined":
        text = f"prepare did not run: {message}. See rlm-batch doctor"
    elif status == "commit":
        text = f"prepare's files on the volume could not be committed: {message}"
    elif status != "error":
        text = (
            f"prepare wrote to a file descriptor of the sandbox ({message or status}): write only to "
            "files that it opens"
        )
    elif kind == "syntax":
        text = f"prepare is not valid Python{where}: {remove_place(message)}"
    elif kind == "memory":
        text = f"prepare ran out of memory{where}: load less, or {describe_more_memory(header)}"
    elif kind == "exit":
        text = f"prepare called exit({message}){where}: let it end without exit, or call exit(0)"
    elif kind == "threads":
        text = (
            f"prepare left these threads running, which forks do not have: {message}. End them in "
            "prepare, or start them in the code"
        )
        traceback = ""
    else:
        text = f"prepare raised {name}{where}: {message}{describe_limit(header, outcome)}"
    advice = find_advice(name, message, traceback, meta.stderr, None, has_network=header["has_network"])
    printed = meta.stderr.rstrip().splitlines()[-MAX_PRINTED_LINES:]  # such as the traceback of a process that failed
    return PrepareError(
        "\n".join(filter(None, (text, *printed, traceback.rstrip(), advice))),
        type=name,
        message=message,
        traceback=traceback,
        stdout=meta.stdout,
        line=line,
        advice=advice,
    )
