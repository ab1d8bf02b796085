"""The importance of each variable of a search for its objective, by one of Optuna's methods."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta
from ...sandbox.result import Result
from .plan import import_optuna
from .study import build_study, keep_quiet

if TYPE_CHECKING:
    from ..reporting.summary import RunSummary

MIN_TRIALS = 20  # trials with a score: fewer tell nothing
MAX_TRIALS = 200  # trials for fANOVA, whose time grows with their square: four seconds for 200 with six variables


@dataclass(frozen=True, slots=True)
class Importances:
    """The importance of each variable, as a share of one, the greatest first."""

    shares: dict[str, float]
    method: str  # such as "fANOVA, 200 of 1,000 trials"
    advice: str = ""  # a way to get better importances, if there is one


def compute_importances(summary: "RunSummary") -> Importances | None:
    """Return the importances of a search's variables by fANOVA, or by PED-ANOVA if fANOVA is not possible.

    Return None for fewer than `MIN_TRIALS` trials with a score, a single variable, no values from Optuna, or no Optuna.
    """
    spec, points = summary.spec, list(summary.points)
    if spec.space is None or spec.objective is None or len(points) < MIN_TRIALS:
        return None
    try:
        optuna = import_optuna()
        evaluator, advice = None, ""
        if not isinstance(spec.space, list):  # fANOVA ignores variables that only some trials have.
            try:
                evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            except ImportError:
                advice = "pip install scikit-learn for fANOVA"
        method = "fANOVA"
        if evaluator is None:
            evaluator, method = optuna.importance.PedAnovaImportanceEvaluator(), "PED-ANOVA"
        elif len(points) > MAX_TRIALS:
            points = [points[number * len(points) // MAX_TRIALS] for number in range(MAX_TRIALS)]
        trials = [Result({spec.objective: point.value}, Meta(point.index, point.variables)) for point in points]
        study = build_study(trials, replace(spec, repeats=None, constraints=()))
        with keep_quiet(optuna):
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ConfigurationError, ValueError, RuntimeError):  # The record's space may be damaged.
        return None
    if len(shares) < 2:
        return None
    total, used = summary.points.added, len(study.trials)
    trials_used = f"{used:,} trials" if used == total else f"{used:,} of {total:,} trials"
    return Importances({str(name): float(share) for name, share in shares.items()}, f"{method}, {trials_used}", advice)
