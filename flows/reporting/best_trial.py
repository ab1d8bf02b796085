"""The best trial by an objective: one rule for a sweep's result, its report and its progress."""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...sandbox.result import Result
from ...tasks.ledger.run_record import Direction


@dataclass(slots=True)
class BestTrial:
    """The trial with the least (or greatest) objective of those that were considered, in whatever order they come.

    Of equals it is the one with the lowest number. A score that is not finite, of a trial that diverged, comes after
    every finite one, whichever is better. `result` and `score` are None as long as none had a score, or without an
    objective. A trial that was pruned is none of them.
    """

    objective: str | None
    direction: Direction = "minimize"
    result: Result | None = None
    score: float | None = None
    _rank: tuple[bool, float, int] | None = None

    def consider(self, result: Result) -> float | None:
        """Takes the trial for the best if it is better, and returns its score: None where it submitted no number."""
        score = None if self.objective is None else result.outputs.get(self.objective)
        if result.meta.pruned or (not is_score(score) and not is_nonfinite(score)):
            return None
        has_diverged = is_nonfinite(score)
        comparable = 0.0 if has_diverged else score if self.direction == "minimize" else -score
        rank = (has_diverged, comparable, result.meta.index or 0)
        if self._rank is None or rank < self._rank:
            self._rank, self.result, self.score = rank, result, score
        return score


def is_nonfinite(value: Any) -> TypeGuard[float]:
    """Whether it is NaN or an infinity."""
    return isinstance(value, float) and not math.isfinite(value)


def is_score(value: Any) -> TypeGuard[float]:
    """Whether it is a number that others can be compared with: finite, and no larger than a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
