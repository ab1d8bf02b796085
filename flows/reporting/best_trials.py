"""The best trials by the objectives of a run."""

import math
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ...sandbox.result import Result
from ...tasks.ledger.run_record import ReportSpec
from .groups import read_number, read_numbers


@dataclass(slots=True)
class BestTrials:
    """The best trials among those considered so far, in any order.

    With one objective, the best trial has the least (or greatest) value. Of equal trials, the one with the lowest
    number is the best. A value that is not finite is worse than every finite value, in both directions. A pruned trial
    is never the best. With several objectives, the best trials are the Pareto front: no other trial is as good in every
    objective and better in one. Without objectives `results` is empty. Only feasible trials can be the best.
    """

    spec: ReportSpec
    # The rank of the best trial, or the losses of each trial on the front, and its result.
    _best: list[tuple[tuple[float, ...], Result]] = field(default_factory=list[tuple[tuple[float, ...], Result]])

    @property
    def results(self) -> list[Result]:
        """The best trials, in the order of their numbers."""
        return sorted((result for _, result in self._best), key=lambda result: result.meta.index or 0)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the best trials."""
        return {result.meta.index or 0 for result in self.results}

    @property
    def result(self) -> Result | None:
        """The best trial by a single objective, or None."""
        return self._best[0][1] if self._best and self.spec.objective is not None else None

    @property
    def score(self) -> float | None:
        """The best trial's value of a single objective, or None."""
        scores = None if self.result is None else read_scores(self.result, self.spec)
        return None if scores is None else scores[0]

    def consider(self, result: Result) -> tuple[float, ...] | None:
        """Keep the trial if no other one is better. Return its scores as `read_scores` does."""
        scores = read_scores(result, self.spec)
        if scores is None or not self.spec.is_feasible(result.outputs):
            return scores
        losses = compute_losses(scores, self.spec)
        if len(losses) == 1:
            rank = (*losses, result.meta.index or 0) if math.isfinite(losses[0]) else (math.inf, result.meta.index or 0)
            if not self._best or rank < self._best[0][0]:
                self._best = [(rank, result)]
        elif not any(_is_better(other, losses) for other, _ in self._best):
            self._best = [(other, trial) for other, trial in self._best if not _is_better(losses, other)]
            self._best.append((losses, result))
        return scores


def _is_better(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Return whether the first losses are less in one objective, and greater in none."""
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def read_scores(result: Result, spec: ReportSpec) -> tuple[float, ...] | None:
    """Return a trial's values of all objectives, or None if it was pruned or lacks a number for one of them.

    The value of a single objective may be NaN or infinite. Several values must be finite.
    """
    if result.meta.pruned or not spec.objectives:
        return None
    scores = read_numbers(result.outputs.get(item.name) for item in spec.objectives)
    if scores is None or (len(scores) > 1 and not all(map(math.isfinite, scores))):
        return None
    return tuple(scores)


def compute_losses(scores: tuple[float, ...], spec: ReportSpec) -> tuple[float, ...]:
    """Return the scores, negated where the objective is maximized, so that less is always better."""
    signs = [1 if item.direction == "minimize" else -1 for item in spec.objectives]
    return tuple(sign * score for sign, score in zip(signs, scores, strict=True))


def is_score(value: Any) -> TypeGuard[float]:
    """Return whether the value can compare trials: a bool, or a finite number that a float can hold."""
    number = read_number(value)
    return number is not None and math.isfinite(number)
