"""Failures grouped by reason: 200 executions that fail alike are one group, with one traceback."""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...sandbox.errors import CodeError
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import Failure
from ...tasks.repeats import REPEAT
from .table import MAX_VARIABLES, format_variables

NUMBER = re.compile(r"\b[0-9a-f-]*\d[0-9a-f-]*\b")  # a number or an id, which differs between failures of one kind
MAX_REASONS = 100  # kept reasons; later failures for other reasons are only counted
MAX_NUMBERS = 5  # numbers of executions that a reason names
MAX_LINES = 12  # lines of a traceback


@dataclass(slots=True)
class FailureReason:
    """The failures with one reason."""

    first: Failure  # the failure of the execution with the lowest number
    count: int = 0
    numbers: list[int] = field(default_factory=list[int])  # the lowest numbers of executions
    is_varied: bool = False  # True if the texts of the errors differ
    # The texts of each named execution's variables, by number and name.
    inputs: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])

    def add(self, number: int, failure: Failure) -> None:
        """Count a failure."""
        self.count += 1
        self.is_varied |= failure.error.summary != self.first.error.summary
        if self.numbers and number < self.numbers[0]:
            self.first = failure
        bisect.insort(self.numbers, number)
        if len(self.numbers) > MAX_NUMBERS:
            self.inputs.pop(self.numbers.pop(), None)
        if number in self.numbers:
            variables = failure.meta.variables.items()
            self.inputs[number] = {name: format_variables({name: value}) for name, value in variables if name != REPEAT}

    def describe(self, files: Sequence[str] = ()) -> str:
        """Return a line with the executions and the error. `files` has each execution's file, or is empty."""
        labels = [files[number] for number in self.numbers] if files else self._name_inputs()
        if any(labels):
            shown = "; ".join(f"{number}, {label}" for number, label in zip(self.numbers, labels, strict=True))
        else:
            shown = ", ".join(map(str, self.numbers))
        more = f" and {self.count - MAX_NUMBERS:,} more" if self.count > MAX_NUMBERS else ""
        noun = "execution" if self.count == 1 else "executions"
        return f"{self.count:,} {noun} ({shown}{more}): {self.describe_error()}"

    def _name_inputs(self) -> list[str]:
        """Return the shortest variable that differs between the named executions, or all variables of a single one."""
        inputs = [self.inputs.get(number, {}) for number in self.numbers]
        if len(inputs) == 1:
            return [", ".join(list(inputs[0].values())[:MAX_VARIABLES])]
        choices = [[texts.get(name, "") for texts in inputs] for name in inputs[0]]
        distinct = [texts for texts in choices if len(set(texts)) == len(texts)]
        return min(distinct, key=lambda texts: len("".join(texts)), default=[""] * len(inputs))

    def describe_error(self) -> str:
        """Return the error of the first failure, and whether there are similar ones."""
        error = self.first.error
        text = f"{type(error).__name__}: {error.summary}"
        if type(error) is CodeError:  # Its summary has the type of the exception.
            text = error.summary.removeprefix("the code raised ")
        return f"{text} (and similar)" if self.is_varied else text

    def list_frames(self) -> list[str]:
        """Return the last lines of the first failure's traceback, without the exception."""
        frames = _list_frames(self.first)
        return ["  ...", *frames[-MAX_LINES:]] if len(frames) > MAX_LINES else frames


class FailureReasons:
    """The reasons of a run's failures. Exceptions of one type in one place of the code are one reason."""

    def __init__(self) -> None:
        self.others = 0  # failures whose reasons are not kept
        self._reasons: dict[tuple[object, ...], FailureReason] = {}

    def add(self, number: int, failure: Failure) -> None:
        """Count the failure of the execution with this number."""
        key = _identify_reason(failure)
        if key not in self._reasons and len(self._reasons) >= MAX_REASONS:
            self.others += 1
            return
        self._reasons.setdefault(key, FailureReason(failure)).add(number, failure)

    def sort(self) -> list[FailureReason]:
        """Return the reasons, the most frequent first."""
        return sorted(self._reasons.values(), key=lambda reason: (-reason.count, reason.numbers[0]))


def _identify_reason(failure: Failure) -> tuple[object, ...]:
    """Return what failures of one reason have in common: the place in the code, or else the text without numbers."""
    error = failure.error
    if isinstance(error, CodeError) and error.line is not None:
        return (type(error), error.type, error.line, *_list_frames(failure)[-2:], error.advice)
    return (type(error), NUMBER.sub("#", error.summary))


def _list_frames(failure: Failure) -> list[str]:
    traceback: str = getattr(failure.error, "traceback", "")
    return [escape_text(line, keep="\t") for line in traceback.splitlines() if line.startswith("  ")]
