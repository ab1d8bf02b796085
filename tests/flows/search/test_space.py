"""Invalid search spaces: their errors come before any code runs."""

from dataclasses import fields
from typing import Any

import pytest

from rlm_batch import ConfigurationError, sweep
from rlm_batch.flows.parameters import Options
from rlm_batch.flows.search.plan import parse_objectives, plan_search
from rlm_batch.flows.search.settings import SearchSettings
from rlm_batch.flows.search.space import Choices, Range, infer_space, parse_space

SPACE = {"x": {"low": 0.0, "high": 1.0}}
CODE = "report(x, 0)\nSUBMIT(y=x)"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "the space is empty"),
        ([{}], "the space is empty"),
        ({"x": 3}, "the space of 'x' is 3: give a list of choices, or a dict with low and high"),
        ({"x": []}, "no choices for 'x'"),
        ({"x": ["a", "b", "a"]}, 'the choice "a" twice'),
        ({"x": [1.0, float("nan")]}, "choices that are not JSON"),
        ({"x": {"low": 1, "high": 0.1}}, "low 1 above high 0.1"),
        ({"x": {"low": 0, "high": 1, "log": True}}, "has low 0: use a low above 0"),
        ({"x": {"low": 1, "hihg": 2}}, "the unknown key 'hihg': use low, high, log, step, type"),
        ({"x": {"low": 1}}, "has no high"),
        ({"x": {"low": "a", "high": 2}}, "low 'a': use a finite number"),
        ({"x": {"low": 0.5, "high": 10**5000}}, "high of so many digits: use a finite number of at most 1e"),
        ({"x": {"low": -1.7e308, "high": 1.0}}, "low -1.7e.308: use a finite number of at most 1e.300"),
        ({"x": {"low": 0.0, "high": 1.0, "step": 1e-320}}, "too small for 0.0 to 1.0"),
        ({"x": {"low": 1, "high": 9, "step": 0}}, "step 0: use a step above 0"),
        ({"x": {"low": 0, "high": 3, "step": 10}}, "step 10, too large for 0 to 3: every trial would have 0; use a sm"),
        ({"x": {"low": 1, "high": 9, "step": 2, "log": True}}, "log and step"),
        ({"x": {"low": 1, "high": 9, "log": 1}}, "log 1: use true or false"),
        ({"x": {"low": 1, "high": 9, "type": "whole"}}, "type 'whole'"),
        ({"x": {"low": 1.5, "high": 9, "type": "int"}}, "whole numbers and low 1.5"),
        ({"x y": [1]}, "a name that Python code cannot use"),
        ({"SUBMIT": [1]}, "'SUBMIT' has the name of a function"),
        ({"x": ["\ud800"]}, "choices that are not UTF-8"),
    ],
)
def test_an_invalid_space_is_refused_with_one_sentence(space: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        parse_space(space)
    assert "\n" not in str(raised.value)


def test_a_start_in_json_text_is_refused_with_one_sentence() -> None:
    parameters: dict[str, Any] = {"space": SPACE, "trials": 3, "objective": "y"}
    with pytest.raises(ConfigurationError, match="is JSON, and a text is taken as the path of a file: pass the values"):
        sweep.sync(CODE, start='[{"x": 0.5}]', **parameters)


def test_a_range_is_integer_if_its_bounds_are_or_on_request() -> None:
    (space,) = parse_space(
        {
            "units": {"low": 16, "high": 64, "step": 16},
            "share": {"low": 0, "high": 1.0},
            "rate": {"low": 1, "high": 2, "type": "float"},
            "opt": {"choices": ["adam", ["sgd", 0.9]]},
        }
    ).alternatives
    assert space["units"] == Range(16, 64, log=False, step=16, is_whole=True)
    assert space["share"] == Range(0, 1.0, log=False, step=None, is_whole=False)
    assert space["rate"] == Range(1, 2, log=False, step=None, is_whole=False)
    assert space["opt"] == Choices(("adam", ["sgd", 0.9]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trials": None}, "trials is missing"),
        ({"trials": 10**9}, "trials is 1,000,000,000, and at most 100,000 are allowed"),
        ({"sampler": "best"}, "unknown sampler 'best': use random or tpe, or an import path"),
        ({"sampler": "nosuch.module:Sampler"}, "cannot be imported"),
        ({"sampler": "optuna.pruners:MedianPruner"}, "is not a subclass"),
        ({"objectives": ()}, "the sampler tpe needs an objective"),
        ({"objectives": (), "sampler": "random", "pruner": "asha"}, "the pruner asha needs an objective"),
        ({"pruner": "sharp"}, "unknown pruner 'sharp': use median, asha, hyperband, patient, or patient:N"),
        ({"pruner": "asha", "objectives": parse_objectives(["y", "z"], "minimize")}, "needs one objective"),
        ({"pruner": "asha", "code": "SUBMIT(y=x)  # reported"}, "never calls report"),
        ({"pruner": "asha", "space": {"report": [1, 2]}}, "'report' would hide the function"),
        ({"options": Options(shards=2)}, "the sampler tpe needs the results of other trials"),
        (
            {"options": Options(shards=2), "sampler": "random", "pruner": "asha"},
            "the pruner asha needs the results of other trials",
        ),
    ],
)
def test_an_impossible_search_is_refused_with_one_sentence(more: dict[str, Any], message: str) -> None:
    objectives = parse_objectives("y", "minimize")
    names = {item.name for item in fields(SearchSettings)}
    settings = SearchSettings(**{name: value for name, value in more.items() if name in names})
    parameters = {"space": SPACE, "trials": 3, "objectives": objectives, "code": CODE, "settings": settings}
    parameters["options"] = Options()
    with pytest.raises(ConfigurationError, match=message) as raised:
        plan_search(**parameters | {name: value for name, value in more.items() if name not in names})
    assert "\n" not in str(raised.value)


def test_a_deployments_run_imports_only_optunas_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of a worker")
    objectives = parse_objectives("y", "minimize")
    parameters: dict[str, Any] = {"trials": 3, "objectives": objectives, "code": CODE, "options": Options()}
    with pytest.raises(ConfigurationError, match="runs of deployments may only import Optuna's own"):
        plan_search(SPACE, **parameters, settings=SearchSettings("os:system"))
    assert plan_search(SPACE, **parameters, settings=SearchSettings("optuna.samplers:QMCSampler")).is_adaptive


def test_a_missing_optuna_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[search\]'"):
        plan_search(SPACE, 3, parse_objectives("y", "minimize"), SearchSettings(), CODE, Options())


@pytest.mark.parametrize(
    ("objective", "direction", "message"),
    [
        ([], "minimize", "the list of objectives is empty"),
        (["a", "b"], ["minimize"], "2 objectives and 1 directions"),
        ("", "minimize", "an objective has no name"),
    ],
)
def test_invalid_objectives_are_refused_with_one_sentence(objective: Any, direction: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_objectives(objective, direction)


def test_a_missing_space_is_inferred_from_the_points() -> None:
    space = infer_space([{"x": 1, "opt": "a"}, {"x": 4, "opt": "b"}, {"x": 2.5, "opt": "a"}])
    assert space.alternatives == ({"x": Range(1, 4, log=False, step=None, is_whole=False), "opt": Choices(("a", "b"))},)
    assert space.find_alternative({"x": 3, "opt": "b"}) == 0
    assert space.find_alternative({"x": 5, "opt": "b"}) is None


def test_a_space_says_how_it_was_read_and_warns_of_guessed_integers() -> None:
    space = parse_space(
        {
            "lr": {"low": 1e-5, "high": 0.1, "log": True},
            "units": {"low": 32, "high": 512, "step": 32},
            "share": {"low": 0, "high": 1},
            "depth": {"low": 0, "high": 1, "type": "int"},
            "opt": ["adam", True],
        }
    )
    assert space.describe() == [
        "lr: real, 1e-05 to 0.1, log",
        "units: integer, 32 to 512, step 32",
        "share: integer, 0 to 1",
        "depth: integer, 0 to 1",
        'opt: choice of "adam", true',
    ]
    (warning,) = space.list_warnings()
    assert warning.startswith("share is integer, because both bounds are: for real numbers write ")
    assert not parse_space({"share": {"low": 0.0, "high": 1.0}}).list_warnings()


def test_a_tuple_of_two_numbers_is_refused_with_both_readings() -> None:
    with pytest.raises(ConfigurationError, match=r"is the tuple \(0.0, 1.0\), .*write \{.*\}.*or \[0.0, 1.0\]"):
        sweep.sync("SUBMIT(y=x)", space={"x": (0.0, 1.0)}, trials=2, objective="y")
