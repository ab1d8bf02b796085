"""The importances of a search's variables in its report."""

import random
from typing import Any
from unittest.mock import Mock

import optuna
import pytest

from rlm_batch import Result
from rlm_batch.flows.reporting.report import build_summary_rows
from rlm_batch.flows.reporting.summary import RunSummary
from rlm_batch.flows.search.importances import compute_importances
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.run_record import Objective, ReportSpec, RunRecord

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install scikit-learn")

LR_AND_UNITS: dict[str, Any] = {"lr": {"low": 0.0, "high": 1.0}, "units": {"low": 1, "high": 64}}


def summarize_search(space: Any, trials: int) -> RunSummary:
    """Return the summary of a random search in which lr decides, and units matter only a little."""
    summary, draw = RunSummary(ReportSpec("trial", (Objective("loss"),), space)), random.Random(0)
    for index in range(trials):
        lr, units = draw.random(), draw.randint(1, 64)
        names = space[0] if isinstance(space, list) else space
        variables = {name: value for name, value in (("lr", lr), ("units", units)) if name in names}
        summary.add(Result({"loss": (lr - 0.3) ** 2 + units / 1000}, Meta(index, variables)))
    return summary


@pytest.mark.parametrize("is_installed", [True, False])
def test_importances_name_their_method_and_trials(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarize_search(LR_AND_UNITS, 300)
    points = [summary.points[number * 300 // 200] for number in range(200)]
    if not is_installed:
        monkeypatch.setattr(optuna.importance, "FanovaImportanceEvaluator", Mock(side_effect=ImportError))
    importances = compute_importances(summary)
    assert importances is not None
    evaluator: Any = optuna.importance.PedAnovaImportanceEvaluator()
    if is_installed:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    study, kinds = optuna.create_study(), optuna.distributions
    for point in points if is_installed else summary.points:
        distributions = {"lr": kinds.FloatDistribution(0, 1), "units": kinds.IntDistribution(1, 64)}
        trial = optuna.create_trial(value=point.value, params=point.variables, distributions=distributions)
        study.add_trial(trial)
    assert importances.shares == optuna.importance.get_param_importances(study, evaluator=evaluator)
    (row,) = [
        row for row in build_summary_rows(summary, [RunRecord("sweep", "/r")], importances) if row[0] == "Importance"
    ]
    method = (
        "fANOVA, 200 of 300 trials" if is_installed else "PED-ANOVA, 300 trials; pip install scikit-learn for fANOVA"
    )
    assert row[1] == f"lr {importances.shares['lr']:.2f}, units {importances.shares['units']:.2f} ({method})"


def test_few_trials_have_no_importances_and_alternatives_have_those_of_ped_anova() -> None:
    assert compute_importances(summarize_search(LR_AND_UNITS, 19)) is None
    assert compute_importances(summarize_search({"lr": LR_AND_UNITS["lr"]}, 20)) is None, "one variable has all"
    importances = compute_importances(summarize_search([LR_AND_UNITS, {**LR_AND_UNITS, "depth": [1, 2]}], 20))
    assert importances is not None
    assert (importances.method, importances.advice) == ("PED-ANOVA, 20 trials", "")
