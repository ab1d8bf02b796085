"""Failures grouped by reason: 200 executions that fail alike are one group, with one traceback."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...sandbox.errors import CodeError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure

NUMBER = re.compile(r"\b[0-9a-f-]*\d[0-9a-f-]*\b")  # a number or an id, which differs between failures of one kind
MAX_NUMBERS = 5  # numbers of executions that a reason names
MAX_LINES = 12  # lines of a traceback


@dataclass(slots=True)
class FailureReason:
    """The failures with one reason: the first of them, and the numbers of all.

    `is_varied` says that their texts differ.
    """

    first: Failure
    numbers: list[int] = field(default_factory=list[int])
    is_varied: bool = False

    def describe(self, files: Sequence[str] = ()) -> str:
        """Return a line with the executions and the error. `files` are the executions' files, if they differ."""
        names = [f"{number}, {files[number]}" if files else str(number) for number in self.numbers[:MAX_NUMBERS]]
        count, shown = len(self.numbers), ("; " if files else ", ").join(names)
        more = f" and {count - MAX_NUMBERS:,} more" if count > MAX_NUMBERS else ""
        noun = "execution" if count == 1 else "executions"
        similar = " (and similar)" if self.is_varied else ""
        return f"{count:,} {noun} ({shown}{more}): {_describe_error(self.first)}{similar}"

    def list_frames(self) -> list[str]:
        """Return the last lines of the first failure's traceback, without the exception."""
        frames = _list_frames(self.first)
        return ["  ...", *frames[-MAX_LINES:]] if len(frames) > MAX_LINES else frames


def group_failures(failures: Iterable[Failure]) -> list[FailureReason]:
    """Return the reasons, the most frequent first. Exceptions of one type in one place of the code are one reason."""
    reasons: dict[tuple[object, ...], FailureReason] = {}
    for failure in failures:
        error = failure.error
        key: tuple[object, ...] = (type(error), NUMBER.sub("#", error.summary))
        if isinstance(error, CodeError) and error.line is not None:
            key = (type(error), error.type, error.line, *_list_frames(failure)[-2:], error.advice)
        reason = reasons.setdefault(key, FailureReason(failure))
        reason.numbers.append(failure.meta.index or 0)
        reason.is_varied |= error.summary != reason.first.error.summary
    return sorted(reasons.values(), key=lambda reason: -len(reason.numbers))


def _list_frames(failure: Failure) -> list[str]:
    traceback: str = getattr(failure.error, "traceback", "")
    return [escape_text(line, keep="\t") for line in traceback.splitlines() if line.startswith("  ")]


def _describe_error(failure: Failure) -> str:
    error = failure.error
    if type(error) is CodeError:
        return error.summary.removeprefix("the code raised ")
    return f"{type(error).__name__}: {error.summary}"
