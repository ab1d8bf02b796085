"""The check of an execution: code that judges what the execution did, and whose submitted fields are the result.

The judged code may try to pass by any means, so the check shares nothing with it that the judged code could change:

- The check runs after the execution has ended, in another sandbox, in which no judged code has ever run. Another
  user or namespace in the same sandbox would not do: in containers, on Daytona and on Modal a sandbox has one user.
- The check's sandbox has no volume, because the judged code may write to the volume.
- The check gets data: what the execution submitted and printed, its error, and copies of its files, which the host made
  when the execution had ended. They are regular files in a folder that is not on `sys.path`.
- Only the check's fields become the result. The host ignores the fields of the judged code except as data.

With `reuse_sandboxes` a lane keeps one sandbox for its checks beside the one for its executions, if the provider has
room for both. Checks can share a sandbox because the caller wrote all of them.

A check must treat what it gets as data. If it imports or runs a file of the judged code, that code runs as the check.
"""

import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..sandbox.errors import (
    CheckError,
    CodeCrashed,
    CodeError,
    ConfigurationError,
    OutcomeUnknown,
    RlmBatchError,
    SandboxLost,
    SubmitError,
    error_from_json,
    error_to_json,
)
from ..sandbox.meta import Meta
from ..sandbox.outcomes.text_escape import change_texts
from ..sandbox.requests.execution_request import encode_variable
from ..sandbox.result import Failure, Outcome, Result
from ..sandbox.wire.strict_json import NotJsonError
from .execution import Execution
from .ledger.collected_files import FOLDER_NAME as FILES_FOLDER_NAME

# The variables that a check gets besides those of the execution.
NAMES = ("submitted", "stdout", "error", "seconds", "folder")
FOLDER_NAME = "execution-files"  # the folder of the copies, below the check's working folder
ARCHIVE_NAME = "execution-files.zip"
MAX_FILES = 1_000  # files of one execution that its check gets
MAX_BYTES = 32 * 1024 * 1024  # bytes of these files together; the host holds them in memory
# The file names in the archive are those that the host has accepted, below one folder.
UNPACK = f"""
import os, shutil, zipfile
shutil.rmtree({FOLDER_NAME!r}, ignore_errors=True)
os.mkdir({FOLDER_NAME!r})
with zipfile.ZipFile({ARCHIVE_NAME!r}) as archive:
    archive.extractall({FOLDER_NAME!r})
os.unlink({ARCHIVE_NAME!r})
for directory, _, names in os.walk({FOLDER_NAME!r}):
    for name in names:
        os.chmod(os.path.join(directory, name), 0o444)
"""


@dataclass(frozen=True, slots=True)
class Check:
    """The code that judges each execution of a flow run."""

    code: str

    @property
    def needs_files(self) -> bool:
        """True if the code may read the execution's files, which it finds by the variable `folder`."""
        return "folder" in self.code

    def build_execution(self, execution: Execution, judged: Outcome) -> Execution:
        """Return the execution that runs the check of an execution with the outcome `judged`.

        Raises:
            SubmitError: The code has submitted what no variable can hold.
        """
        is_success = isinstance(judged, Result)
        variables = {name: value for name, value in execution.variables.items() if name not in NAMES}
        variables |= {"seconds": judged.meta.seconds, "folder": FOLDER_NAME}
        encoded = {name: value for name, value in execution.encoded_variables.items() if name not in NAMES}
        try:
            encoded["submitted"] = encode_variable(judged.outputs if is_success else {})
            encoded["stdout"] = encode_variable(_replace_surrogates(judged.meta.stdout))
            encoded["error"] = encode_variable(None if is_success else describe_error(judged.error))
        except (NotJsonError, ValueError, RecursionError) as problem:
            raise SubmitError(f"no variable can hold what the code submitted: {problem}") from None
        archive = execution.archive
        if self.needs_files and not archive:
            # An empty archive removes the files of the execution that was judged before in the same sandbox.
            archive, _ = build_archive(Path(), ())
        return Execution(execution.index, self.code, variables, execution.key, encoded, archive=archive)


def is_judged(error: RlmBatchError) -> bool:
    """Return whether a check judges an execution that failed with this error: only if its code ran and failed."""
    has_reached_sandbox = error.meta is not None and error.meta.sandbox_id != ""
    return error.is_failure_of_code and has_reached_sandbox


def describe_error(error: RlmBatchError) -> dict[str, Any]:
    """Return an error as a check finds it: its JSON in the ledger without the output, and always a `type`.

    The type is that of the exception, "OutOfMemory", or the class of the error, such as "ExecutionTimeout". Code
    chooses the types of its exceptions, but not the class, which `error` names.
    """
    described = error_to_json(error)
    described.pop("stdout", None)  # The check's variable `stdout` has it.
    is_out_of_memory = isinstance(error, CodeCrashed) and error.out_of_memory
    described["type"] = "OutOfMemory" if is_out_of_memory else getattr(error, "type", "") or type(error).__name__
    described["message"] = getattr(error, "message", "") or error.summary
    described["line"] = getattr(error, "line", None)
    return change_texts(described, _replace_surrogates)


class _JudgedFields(BaseModel):
    """The fields of `meta.judged` from which the outcome of the execution is restored."""

    outputs: dict[str, Any]
    submitted: bool
    error: dict[str, Any] | str | None  # Earlier versions wrote the error's text.


def restore_ended(outcome: Outcome) -> Outcome | None:
    """Return the outcome of an execution for another check, from an outcome of an earlier run in a ledger.

    The fields of the earlier check do not count, and those of the code are data. The return value is None if no check
    judges the execution, or if the ledger is damaged.
    """
    meta, facts = outcome.meta, outcome.meta.judged
    ended = outcome
    if facts is not None:
        try:
            fields = _JudgedFields.model_validate(facts)
            meta = replace(meta, judged=None, submitted=fields.submitted)
            error = CodeError(fields.error) if isinstance(fields.error, str) else fields.error
            if error is None:
                ended = Result(fields.outputs, meta)
            else:
                ended = Failure(error_from_json(error) if isinstance(error, dict) else error, meta)
        except (ValueError, KeyError, TypeError):
            return None
    if isinstance(ended, Result):
        return None if meta.pruned else ended
    ended.error.meta = meta
    return ended if is_judged(ended.error) else None


def archive_collected(ledger: Path, meta: Meta) -> bytes:
    """Return a ZIP archive of the files of an execution that an earlier run collected.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not in the folder of a single execution of this ledger, or is not a regular file.
    """
    if not meta.collected:
        return b""
    root = ledger / FILES_FOLDER_NAME
    real_root = root.resolve(strict=True)
    folders: set[str] = set()
    for path in map(Path, meta.collected):
        name = path.relative_to(root)
        has_links = path.resolve(strict=True) != real_root / name
        if has_links or not path.is_file():
            raise ValueError(f"{path} is not a collected file")
        folders.add(name.parts[0])
    (folder,) = folders
    return build_archive(root / folder, meta.collected)[0]


def build_archive(folder: Path, paths: Iterable[str]) -> tuple[bytes, list[str]]:
    """Return a ZIP archive of files below a folder of the host, and a sentence for each file beyond its limits."""
    remaining_bytes = MAX_BYTES
    problems: list[str] = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number, path in enumerate(map(Path, paths)):
            name = str(path.relative_to(folder))
            size = path.stat().st_size
            if number >= MAX_FILES or size > remaining_bytes:
                problems.append(
                    f"{name} was not copied for the check: it gets {MAX_FILES:,} files of {MAX_BYTES:,} bytes"
                )
                continue
            remaining_bytes -= size
            # `ZipInfo` has a fixed date, because ZIP cannot hold all dates of files.
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue(), problems


def build_judged_result(execution: Execution, judged: Outcome, check: Result) -> Result:
    """Return the result of a judged execution: the check's fields, and the execution's own fields in `meta.judged`.

    Raises:
        CheckError: The check has submitted nothing.
    """
    meta = _build_judged_meta(execution, judged, check.meta)
    if not check.outputs:
        error = CheckError("the check ended without fields: it must call SUBMIT with fields, as in SUBMIT(passed=True)")
        error.meta = meta
        raise error
    return Result(check.outputs, replace(meta, submitted=True))


def _build_judged_meta(execution: Execution, judged: Outcome, check: Meta | None) -> Meta:
    """Return the meta of a judged execution. `check` is the meta of its check, if the check ran."""
    check = check or Meta()
    is_success = isinstance(judged, Result)
    facts: dict[str, Any] = {
        "outputs": judged.outputs if is_success else {},
        "submitted": judged.meta.submitted,
        "error": None if is_success else describe_error(judged.error),
        "check_seconds": check.seconds,
        "check_stdout": check.stdout,
        "check_stderr": check.stderr,
    }
    if execution.ended_earlier:
        facts["again"] = True  # Another line of the ledger has the execution's usage of models.
    if execution.archive_problems:
        facts["missing_files"] = execution.archive_problems
    return replace(judged.meta, attempt=execution.attempt, earlier_errors=execution.earlier_errors, judged=facts)


def explain(error: RlmBatchError, execution: Execution, judged: Outcome) -> RlmBatchError:
    """Return the error of an execution whose check failed with `error`. Errors of the sandbox keep their type."""
    explained = error
    if error.is_failure_of_code or isinstance(error, ConfigurationError):
        text = f"the check failed: {error.text}"
        if error.text.startswith("the code "):
            text = error.text.replace("the code", "the check", 1)
        attributes = {name: getattr(error, name) for name in CheckError.details if hasattr(error, name)}
        explained = CheckError(text, **attributes)
    elif isinstance(error, OutcomeUnknown):
        # Nothing is unknown here, because a check changes nothing that outlives its sandbox.
        explained = SandboxLost(f"the sandbox of the check ended before the check: {error.text}")
    explained.meta = _build_judged_meta(execution, judged, error.meta)
    return explained


def explain_last(error: RlmBatchError) -> CheckError:
    """Return the error of an execution whose check failed with `error` and is not tried again."""
    if isinstance(error, CheckError):
        return error
    check_error = CheckError(f"the check did not run: {type(error).__name__}: {error.text}")
    check_error.meta = error.meta
    return check_error


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigurationError if a variable of the executions has the name of one that the check gets."""
    for name in names:
        if name in NAMES:
            raise ConfigurationError(
                f"the variable {name!r} has the name of a variable that the check gets ({', '.join(NAMES)}): rename it"
            )


def _replace_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which no variable can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
