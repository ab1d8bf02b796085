"""A decoder for the end of `prepare` code, which succeeds or raises an error.

As in `decoding`, the data is untrusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PrepareError, RlmBatchError, SandboxStartError
from .ending import Ending

if TYPE_CHECKING:
    from ..meta import Meta

MAX_PRINTED_LINES = 10  # last lines of the error output in an error


def check_preparation(header: dict[str, Any], body: bytes, meta: Meta, timeout: float | None) -> None:
    """Return if the preparation succeeded; otherwise raise its error, with `meta`."""
    if header["status"] == "finished":
        return
    error = _build_error(Ending.read(header, body, meta, timeout, "prepare"))
    error.meta = meta
    raise error


def _build_error(end: Ending) -> RlmBatchError:
    message, where, details = end.message, end.where, end.details
    match end.header["status"], end.outcome.get("kind"):
        case "setup", _:
            return SandboxStartError(f"prepare did not run: {message}{end.describe_shortage()}")
        case "timeout", _:
            text = (
                f"prepare was still running{where} after its `prepare_timeout` of "
                f"{end.timeout or 0:g} s: raise it, or do less in prepare"
            )
        case "crashed", _:
            text = end.describe_crash()
        case "unconfined", _:
            text = f"prepare did not run: {message}. See rlm-batch doctor"
        case "commit", _:
            text = f"prepare's files on the volume could not be committed: {message}"
        case "error", "syntax":
            text = f"prepare is not valid Python{where}: {end.syntax_message}"
        case "error", "memory":
            text = f"prepare ran out of memory{where}: load less, or {end.describe_more_memory()}"
        case "error", "exit":
            text = f"prepare called exit({message}){where}: let it end without exit, or call exit(0)"
        case "error", "threads":
            text = (
                f"prepare left these threads running, which forks do not have: {message}. End them in "
                "prepare, or start them in the code"
            )
            details["traceback"] = ""
        case "error", _:
            text = f"prepare raised {end.type}{where}: {message}{end.describe_limit(end.outcome.get('limit'))}"
        case status, _:
            text = (
                f"prepare wrote to a file descriptor of the sandbox ({message or status}): write only to "
                "files that it opens"
            )
    advice = end.find_advice(None)
    printed = end.meta.stderr.rstrip().splitlines()[-MAX_PRINTED_LINES:]  # such as the traceback of a failed program
    lines = (text, *printed, details["traceback"].rstrip(), advice)
    return PrepareError("\n".join(filter(None, lines)), advice=advice, **details)
