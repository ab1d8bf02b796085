"""The best trial by an objective: one rule for a sweep's result, its report and its progress."""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...sandbox.result import Result
from ...tasks.ledger.run_record import Direction


@dataclass(slots=True)
class BestTrial:
    """The trial with the least (or greatest) objective of those that were considered, in whatever order they come.

    Of equals it is the one with the lowest number. `result` and `score` are None as long as none had a score, or
    without an objective.
    """

    objective: str | None
    direction: Direction = "minimize"
    result: Result | None = None
    score: float | None = None
    _rank: tuple[float, int] | None = None

    def consider(self, result: Result) -> float | None:
        """Takes the trial for the best if it is better, and returns its score: None where it submitted no number."""
        score = None if self.objective is None else result.outputs.get(self.objective)
        if not is_score(score):
            return None
        rank = (score if self.direction == "minimize" else -score, result.meta.index or 0)
        if self._rank is None or rank < self._rank:
            self._rank, self.result, self.score = rank, result, score
        return score


def is_score(value: Any) -> TypeGuard[float]:
    """Whether it is a number that others can be compared with: finite, and no larger than a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
