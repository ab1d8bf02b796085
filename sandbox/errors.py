"""Everything that can go wrong, each with a type of its own.

An error's text says what happened, where, and what to do next. `retry_rule` says when an execution that met it is tried
again; it is read by the type, never by searching a message. Errors are JSON both ways, for they stand in the ledger.
Code chooses parts of these texts: what `str` gives can be shown on a terminal, and attributes have them as they are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .outcomes.base_error import RlmBatchError as RlmBatchError

if TYPE_CHECKING:
    from .result import Failure, Outcome


class CodeError(RlmBatchError):
    """The code raised an exception.

    `type` and `message` are the exception's, `traceback` begins at the code's own first frame, `line` is the line of
    the code where it happened, `stdout` what the code had printed.
    """

    retry_rule = "if asked"
    details = ("type", "message", "traceback", "stdout", "line")
    type: str = ""
    message: str = ""
    traceback: str = ""
    stdout: str = ""
    line: int | None = None


class CodeSyntaxError(CodeError):
    """The code could not be compiled; none of it ran."""


class CodeCrashed(CodeError):
    """The process that ran the code ended before the code did, or ran out of memory.

    `exit_code` or `signal` is how it ended; `out_of_memory` is true where the memory limit or the kernel's
    out-of-memory killer ended it.
    """

    details = (*CodeError.details, "exit_code", "signal", "out_of_memory")
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False


class ExecutionTimeout(RlmBatchError):
    """The code outlived its timeout of `timeout` seconds; `traceback` is where it was, if it could be asked."""

    retry_rule = "if asked"
    details = ("timeout", "traceback", "stdout")
    timeout: float = 0.0
    traceback: str = ""
    stdout: str = ""


class PrepareError(RlmBatchError):
    """The code that was to prepare a sandbox failed, and so no execution has run there.

    Attributes are as of `CodeError`, of that code; `traceback` and `line` are empty where it has no such place.
    """

    details = CodeError.details
    type: str = ""
    message: str = ""
    traceback: str = ""
    stdout: str = ""
    line: int | None = None


class SubmitError(RlmBatchError):
    """SUBMIT was given what cannot be handed back: not JSON, too large, or not the fields that were asked for."""


class VolumeError(RlmBatchError):
    """A path that leaves the volume, a file that is not there or could not be written, or no volume at all."""


class StateLost(RlmBatchError):
    """The process that held the state of earlier executions has ended."""


class SandboxStartError(RlmBatchError):
    """No sandbox could be opened; whatever was created has been removed."""

    retry_rule = "always"


class SandboxLost(RlmBatchError):
    """The sandbox went away before the code was sent."""

    retry_rule = "always"


class OutcomeUnknown(RlmBatchError):
    """The sandbox went away after the code was sent and before it answered: it may have run, wholly or in part."""

    retry_rule = "if idempotent"


class QuotaExceeded(RlmBatchError):
    """The provider refused for now; `retry_after` is the number of seconds that it asked for, or None."""

    retry_rule = "always"
    details = ("retry_after",)
    retry_after: float | None = None


class ConfigurationError(RlmBatchError):
    """Credentials, image, block or parameter are wrong; trying again would not help."""


class BudgetExceeded(RlmBatchError):
    """A query would take more calls, tokens or money than it was given."""


class DepthExceeded(RlmBatchError):
    """A recursive query was asked below the greatest depth."""


class DeadlineExceeded(RlmBatchError):
    """The time that was given to the whole flow, or to a tree of queries, is over."""


class NotRun(RlmBatchError):
    """The execution was not begun, because one that it builds on has failed."""


class QueryError(RlmBatchError):
    """No model answered."""


class SandboxesLeft(RlmBatchError):
    """Sandboxes that nobody uses any more could not be removed: those in `sandboxes`, by their ids."""

    details = ("sandboxes",)
    sandboxes: Sequence[str] = ()


class ExecutionsFailed(RlmBatchError):
    """A flow's end when some executions failed.

    `results` has a `Result` or a `Failure` for each execution, in order; `failures` are the failures among them;
    `results_path` is the ledger's directory.
    """

    details = ("results_path",)
    results: Sequence["Outcome"] = ()
    failures: Sequence["Failure"] = ()
    results_path: str = ""


def error_to_json(error: RlmBatchError) -> dict[str, Any]:
    """The error as a dict of JSON values, without its meta."""
    return {"error": type(error).__name__, "text": error.text, **{name: getattr(error, name) for name in error.details}}


def error_from_json(data: dict[str, Any]) -> RlmBatchError:
    """Return the error that `error_to_json` was given; an RlmBatchError if its class is not imported here."""
    kind = RlmBatchError._kinds.get(data["error"], RlmBatchError)  # type: ignore[reportPrivateUsage]
    details = {name: data[name] for name in kind.details if name in data}
    return kind(data["text"], **details)
