"""The Pareto front of trials with several objectives: those that no other trial beats in all of them."""

from dataclasses import dataclass, field

from ...sandbox.result import Result
from ...tasks.ledger.run_record import Objective
from .best_trial import is_score


@dataclass(slots=True)
class ParetoFront:
    """The trials than which no other is as good in every objective and better in one, in whatever order they come."""

    objectives: tuple[Objective, ...]
    _members: list[tuple[tuple[float, ...], Result]] = field(default_factory=list[tuple[tuple[float, ...], Result]])

    @property
    def results(self) -> list[Result]:
        """The front's trials, by their numbers."""
        return sorted((result for _, result in self._members), key=lambda result: result.meta.index or 0)

    def consider(self, result: Result) -> tuple[float, ...] | None:
        """Takes a trial into the front if it belongs there, and returns its scores; None where one is no number."""
        scores = [score for item in self.objectives if is_score(score := result.outputs.get(item.name))]
        if len(scores) < len(self.objectives):
            return None
        signs = [1 if objective.direction == "minimize" else -1 for objective in self.objectives]
        losses = tuple(sign * float(score) for sign, score in zip(signs, scores, strict=True))
        if not any(_dominates(other, losses) for other, _ in self._members):
            self._members = [member for member in self._members if not _dominates(losses, member[0])]
            self._members.append((losses, result))
        return tuple(map(float, scores))


def _dominates(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
