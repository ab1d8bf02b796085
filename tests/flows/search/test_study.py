"""The Optuna study of a search: its trials, and the supported samplers."""

from importlib.util import find_spec
from typing import Any

import optuna
import pytest

from rlm_batch import ConfigurationError, Failure, Result
from rlm_batch.flows.search.plan import SearchPlan, parse_objectives
from rlm_batch.flows.search.space import parse_space
from rlm_batch.flows.search.study import TrialStudy, check_search, derive_seed
from rlm_batch.sandbox.errors import CodeError
from rlm_batch.sandbox.meta import Meta

SPACE: dict[str, Any] = {"lr": {"low": 1e-5, "high": 0.1, "log": True}, "opt": ["adam", "sgd", "rmsprop"]}


def make_study(space: Any, sampler: str = "tpe", objective: Any = "loss", **more: Any) -> TrialStudy:
    return TrialStudy(SearchPlan(parse_space(space), 100, parse_objectives(objective, "minimize"), sampler, **more))


def test_alternatives_share_only_identical_variables() -> None:
    lr, wide = {"low": 0.001, "high": 0.1, "log": True}, {"low": 0.0, "high": 9.0}
    study = make_study(
        [{"kind": ["a"], "lr": lr, "p": [1, 2]}, {"kind": ["b"], "lr": lr, "p": wide, "layers": [[1], [2, 2]]}]
    )
    for number in range(30):
        point = study.ask()
        is_first = point.variables["kind"] == "a"
        assert point.alternative == (0 if is_first else 1)
        assert list(point.variables) == (["kind", "lr", "p"] if is_first else ["kind", "lr", "p", "layers"])
        assert point.variables.get("layers") in (None, [1], [2, 2])
        study.tell(number, Result({"loss": point.variables["lr"] + is_first}, Meta()))
    names = {name for trial in study.study.trials for name in trial.params}
    assert {"lr", "p in space 0", "p in space 1", "layers"} <= names


def test_choices_that_compare_equal_in_python_stay_distinct() -> None:
    study = make_study({"flag": [1, True, None, "1", [1]]}, "random")
    flags = [study.ask().variables["flag"] for _ in range(60)]
    assert {repr(value) for value in flags} == {"1", "True", "None", "'1'", "[1]"}


def test_optuna_knows_the_state_of_each_trial() -> None:
    study, states = make_study({"x": [1, 2]}, pruner="median"), optuna.trial.TrialState
    for _ in range(6):
        study.ask()
    study.tell(0, Result({"loss": True}, Meta()))
    study.tell(1, Result({"loss": float("nan")}, Meta()))
    study.tell(2, Result({"other": 1}, Meta()))
    study.tell(3, Failure(CodeError("it failed"), Meta()))
    study.report(4, 3, 0.5)
    study.tell(4, Result({"loss": 0.5}, Meta(pruned=True)))
    trial_states = [trial.state for trial in study.study.trials]
    assert trial_states == [states.COMPLETE, states.FAIL, states.FAIL, states.FAIL, states.PRUNED, states.RUNNING]
    assert (study.study.trials[4].value, study.study.best_value) == (0.5, 1)
    assert [study.is_running(number) for number in (4, 5, 6)] == [False, True, False]


def test_a_sampler_by_its_import_path_is_seeded_once() -> None:
    studies = [make_study({"x": {"low": 0.0, "high": 1.0}}, "optuna.samplers:NSGAIISampler") for _ in range(2)]
    first, second = ([study.ask().variables["x"] for _ in range(8)] for study in studies)
    assert first == second
    assert len(set(first)) == 8
    known = optuna.create_study(sampler=optuna.samplers.NSGAIISampler(seed=derive_seed(0, 0)))
    assert first == [known.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)}).params["x"] for _ in range(8)]


@pytest.mark.filterwarnings("error")
def test_a_pruner_accepts_nonfinite_values_without_a_warning() -> None:
    values = [float("nan"), 1e308, float("inf"), -1e308, float("-inf")]
    study = make_study({"x": {"low": 0.0, "high": 1.0}}, "random", pruner="median")
    for number in range(8):
        study.ask()
        for step in range(4):
            study.report(number, step, values[(number + step) % len(values)])
        study.tell(number, Result({"loss": float(number)}, Meta(number)))


class LateImportSampler(optuna.samplers.RandomSampler):
    """A sampler that imports a missing module after the first trial, as Optuna's CMA-ES sampler does."""

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        if trial.number:
            raise ModuleNotFoundError("No module named 'nosuch'")
        return super().sample_relative(study, trial, search_space)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("optuna.samplers:GridSampler", r"GridSampler cannot be used: .*search_space"),
        (f"{__name__}:LateImportSampler", "cannot be used: No module named 'nosuch'"),
        pytest.param(
            "optuna.samplers:GPSampler",
            "cannot be used: No module named 'torch'",
            marks=pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed"),
        ),
    ],
)
def test_a_sampler_with_a_missing_dependency_is_refused_before_the_run(sampler: str, message: str) -> None:
    plan = SearchPlan(parse_space(SPACE), 9, parse_objectives("y", "minimize"), sampler)
    with pytest.raises(ConfigurationError, match=message):
        check_search(plan)
