"""Failures grouped by reason: 200 executions that fail alike are one group, with one traceback."""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...sandbox.errors import CodeError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure

NUMBER = re.compile(r"\b[0-9a-f-]*\d[0-9a-f-]*\b")  # a number or an id, which differs between failures of one kind
MAX_REASONS = 100  # kept reasons; later failures for other reasons are only counted
MAX_NUMBERS = 5  # numbers of executions that a reason names
MAX_LINES = 12  # lines of a traceback


@dataclass(slots=True)
class FailureReason:
    """The failures with one reason: how many there are, the first of them, and the first numbers.

    `is_varied` says that their texts differ.
    """

    first: Failure
    count: int = 0
    numbers: list[int] = field(default_factory=list[int])
    is_varied: bool = False

    def add(self, number: int, failure: Failure) -> None:
        """Count a failure."""
        self.count += 1
        self.is_varied |= failure.error.summary != self.first.error.summary
        if self.numbers and number < self.numbers[0]:
            self.first = failure
        bisect.insort(self.numbers, number)
        del self.numbers[MAX_NUMBERS:]

    def describe(self, files: Sequence[str] = ()) -> str:
        """Return a line with the executions and the error. `files` has each execution's file, or is empty."""
        names = [f"{number}, {files[number]}" if files else str(number) for number in self.numbers]
        shown = ("; " if files else ", ").join(names)
        more = f" and {self.count - MAX_NUMBERS:,} more" if self.count > MAX_NUMBERS else ""
        noun = "execution" if self.count == 1 else "executions"
        return f"{self.count:,} {noun} ({shown}{more}): {self.describe_error()}"

    def describe_error(self) -> str:
        """Return the error of the first failure, and whether there are similar ones."""
        error = self.first.error
        is_of_code = type(error) is CodeError
        text = (
            error.summary.removeprefix("the code raised ") if is_of_code else f"{type(error).__name__}: {error.summary}"
        )
        return f"{text} (and similar)" if self.is_varied else text

    def list_frames(self) -> list[str]:
        """Return the last lines of the first failure's traceback, without the exception."""
        frames = _list_frames(self.first)
        return ["  ...", *frames[-MAX_LINES:]] if len(frames) > MAX_LINES else frames


class FailureReasons:
    """The reasons of a run's failures. Exceptions of one type in one place of the code are one reason."""

    def __init__(self) -> None:
        self.others = 0  # failures for further reasons
        self._reasons: dict[tuple[object, ...], FailureReason] = {}

    def add(self, number: int, failure: Failure) -> None:
        """Count the failure of the execution with this number."""
        error = failure.error
        key: tuple[object, ...] = (type(error), NUMBER.sub("#", error.summary))
        if isinstance(error, CodeError) and error.line is not None:
            key = (type(error), error.type, error.line, *_list_frames(failure)[-2:], error.advice)
        if key not in self._reasons and len(self._reasons) >= MAX_REASONS:
            self.others += 1
            return
        self._reasons.setdefault(key, FailureReason(failure)).add(number, failure)

    def sort(self) -> list[FailureReason]:
        """Return the reasons, the most frequent first."""
        return sorted(self._reasons.values(), key=lambda reason: (-reason.count, reason.numbers[0]))


def _list_frames(failure: Failure) -> list[str]:
    traceback: str = getattr(failure.error, "traceback", "")
    return [escape_text(line, keep="\t") for line in traceback.splitlines() if line.startswith("  ")]
