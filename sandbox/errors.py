"""The errors of the project, one class for each kind.

An error's text says what happened, where, and what to do next. `retry_rule` says when a failed execution is retried.
The class decides this, never the text. Errors convert to JSON and back, because ledgers store them. Code can choose
parts of the texts, so `str` escapes them for a terminal; attributes are unescaped.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .meta import Meta
from .outcomes.text_escape import LINE_CHARACTERS, escape_text

if TYPE_CHECKING:
    from .result import Failure, Outcome

MAX_SUMMARY_CHARACTERS = 500  # one line of a table or a log

RetryRule = Literal["never", "if asked", "if idempotent", "always"]


class RlmBatchError(Exception):
    """The base class of all rlm-batch errors: a text, and attributes that a subclass declares.

    `str()` escapes characters that a terminal would interpret; `text` is the original text. `meta` describes the failed
    execution (its output, its sandbox, its seconds), or is None without an execution.

    Args:
        text: The message.
        **attributes: Values of the attributes that the class declares.
    """

    retry_rule: ClassVar[RetryRule] = "never"
    is_failure_of_code: bool = False  # The code ran and failed by itself, so rates count it as not passed.
    details: ClassVar[tuple[str, ...]] = ()  # attributes that the JSON contains besides the text
    _kinds: ClassVar[dict[str, type["RlmBatchError"]]] = {}  # all subclasses, by name

    def __init__(self, text: str, **attributes: Any) -> None:
        super().__init__(text)
        self.meta: Meta | None = None
        for name, value in attributes.items():
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            setattr(self, name, value)

    def __init_subclass__(cls) -> None:
        cls._kinds[cls.__name__] = cls

    @property
    def text(self) -> str:
        """Return the original text. It may contain control characters that code put there."""
        return super().__str__()

    def __str__(self) -> str:
        return escape_text(self.text, keep=LINE_CHARACTERS)

    @property
    def summary(self) -> str:
        """Return the first line of the text, escaped and cut to the length that a table or a log shows."""
        line = self.text.partition("\n")[0]
        shown = line if len(line) <= MAX_SUMMARY_CHARACTERS else f"{line[:MAX_SUMMARY_CHARACTERS]}..."
        return escape_text(shown, keep="\t")


class _CodeDetails:
    """The attributes of errors that describe a failure of code."""

    details = ("type", "message", "traceback", "stdout", "line", "advice")
    type: str = ""
    message: str = ""
    traceback: str = ""
    stdout: str = ""
    line: int | None = None
    advice: str = ""


class CodeError(_CodeDetails, RlmBatchError):
    """The code raised an exception.

    Attributes:
        type: Class name of the exception.
        message: Message of the exception.
        traceback: Traceback from the code's own first frame on.
        stdout: Output of the code so far.
        line: Line of the code that raised.
        advice: A sentence on what to do, if the cause is known; also the last line of the error's text.
    """

    retry_rule = "if asked"
    is_failure_of_code = True


class CodeSyntaxError(CodeError):
    """The code could not be compiled; none of it ran."""


class CodeCrashed(CodeError):
    """The process that ran the code ended before the code finished, or ran out of memory.

    Attributes:
        exit_code: Exit code of the process, or None.
        signal: Number of the signal that ended the process, or None.
        out_of_memory: True if the memory limit or the kernel's out-of-memory killer ended the process.
    """

    details = (*CodeError.details, "exit_code", "signal", "out_of_memory")
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False


class ExecutionTimeout(RlmBatchError):
    """The code exceeded its timeout.

    Attributes:
        timeout: Seconds that the code was allowed.
        traceback: Traceback of the code at the timeout; empty if the process did not answer.
        stdout: Output of the code so far.
    """

    retry_rule = "if asked"
    is_failure_of_code = True
    details = ("timeout", "traceback", "stdout")
    timeout: float = 0.0
    traceback: str = ""
    stdout: str = ""


class PrepareError(_CodeDetails, RlmBatchError):
    """The code that prepares a sandbox failed, so no execution ran there. This error ends the flow run.

    The attributes describe the failure of this code, as in `CodeError`. `traceback` and `line` are empty if the failure
    has no location.
    """


class CheckError(_CodeDetails, RlmBatchError):
    """The check of an execution failed, so the execution has no fields. The judged code is not the reason.

    The attributes describe the failure of the check's code, as in `CodeError`. They are empty if the check did not run.
    """


class SubmitError(RlmBatchError):
    """SUBMIT received values that it cannot return: not JSON, too large, or not the requested fields."""

    is_failure_of_code = True


class VolumeError(RlmBatchError):
    """A path leaves the volume, a file is missing or not writable, or there is no volume.

    Attributes:
        is_failure_of_code: True if the code raised it, and False if the host could not send, read or commit a file.
    """

    details = ("is_failure_of_code",)


class StateLost(RlmBatchError):
    """The process that held the state of earlier executions has ended."""


class SandboxStartError(RlmBatchError):
    """No sandbox could be opened. Resources that were created for it have been removed."""

    retry_rule = "always"


class SandboxLost(RlmBatchError):
    """The sandbox ended before the code was sent."""

    retry_rule = "always"


class OutcomeUnknown(RlmBatchError):
    """The sandbox ended after the code was sent and before it answered. The code may have run, fully or partly."""

    retry_rule = "if idempotent"


class QuotaExceeded(RlmBatchError):
    """The provider refused temporarily, the workspace is full, or this process has no free file descriptors.

    Attributes:
        retry_after: Seconds that the provider asked to wait, or None.
    """

    retry_rule = "always"
    details = ("retry_after",)
    retry_after: float | None = None


class ConfigurationError(RlmBatchError):
    """Credentials, image, block or parameter are wrong. Retrying does not help."""


class BudgetExceeded(RlmBatchError):
    """A query would exceed its limit of calls, tokens or money."""


class DepthExceeded(RlmBatchError):
    """A recursive query exceeded the maximum depth."""


class DeadlineExceeded(RlmBatchError):
    """The time limit of the flow or of a tree of queries was exceeded."""


class NotRun(RlmBatchError):
    """The execution did not start.

    An execution that it depends on failed, `max_failures` was reached, or its shard was lost.
    """


class QueryError(RlmBatchError):
    """No model answered.

    Attributes:
        is_failure_of_code: True if the models answered, but a recursive model submitted no answer within its turns.
    """

    details = ("is_failure_of_code",)


class SandboxesLeft(RlmBatchError):
    """Unused sandboxes could not be removed.

    Attributes:
        sandboxes: Ids of these sandboxes.
    """

    details = ("sandboxes",)
    sandboxes: Sequence[str] = ()


class ExecutionsFailed(RlmBatchError):
    """Some executions of a flow failed.

    Attributes:
        results: A `Result` or a `Failure` for each execution, in order.
        failures: The failures among the results.
        results_path: Directory of the ledger.
    """

    details = ("results_path",)
    results: Sequence["Outcome"] = ()
    failures: Sequence["Failure"] = ()
    results_path: str = ""


def error_to_json(error: RlmBatchError) -> dict[str, Any]:
    """Convert an error to a dict of JSON values, without its meta."""
    return {"error": type(error).__name__, "text": error.text, **{name: getattr(error, name) for name in error.details}}


def error_from_json(data: dict[str, Any]) -> RlmBatchError:
    """Convert the output of `error_to_json` back to an error. An unknown class becomes RlmBatchError."""
    kind = RlmBatchError._kinds.get(data["error"], RlmBatchError)  # type: ignore[reportPrivateUsage]
    details = {name: data[name] for name in kind.details if name in data}
    return kind(data["text"], **details)
