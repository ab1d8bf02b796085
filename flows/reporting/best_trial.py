"""The best trial by an objective: one rule for a sweep's result, its report and its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...sandbox.result import Result
from ...tasks.ledger.run_record import Direction


@dataclass(slots=True)
class BestTrial:
    """The trial with the least (or greatest) objective of those that were considered, in whatever order they come.

    Of equals it is the one with the lowest number. `result` and `score` are None as long as none had a score.
    """

    objective: str
    direction: Direction = "minimize"
    result: Result | None = None
    score: float | None = None

    def consider(self, result: Result) -> float | None:
        """Takes the trial for the best if it is better, and returns its score: None where it submitted no number."""
        score = result.outputs.get(self.objective)
        if not is_score(score):
            return None
        if self.result is None or self.score is None:
            is_better = True
        elif score == self.score:
            is_better = (result.meta.index or 0) < (self.result.meta.index or 0)
        else:
            is_better = (score < self.score) == (self.direction == "minimize")
        if is_better:
            self.result, self.score = result, score
        return score


def is_score(value: Any) -> TypeGuard[float]:
    """Whether it is a number that others can be compared with: finite, and no larger than a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
